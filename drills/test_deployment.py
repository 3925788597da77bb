"""A real federation on the loopback address: TLS, node keys, the proxy; clients and server die and come back.

Not part of the suite (`make test-deploy`): a node that vanished is let in again after about a minute. Everything it
starts lies under one temporary directory, and only processes that name it are ever ended.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SEMIFED = str(Path(sys.executable).with_name("semifed"))
SUPERNODE = str(Path(sys.executable).with_name("flower-supernode"))
RECIPE = ["rounds=3", "scenario.clients=3", "clients_per_round=3", "min_clients=3", "evaluate.unseen=[]"]
OPENFL = ["method=openfl", "evaluate.folds=0", *RECIPE]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Federation:
    """Three clients and a server, and what was started for them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.running: list[subprocess.Popen[bytes]] = []
        self.door, self.inside = free_port(), free_port()
        self.started = time.monotonic()
        self.command(
            "init", str(root / "fed"), *OPENFL, "engine.timeout=300", "--recipe", "quickstart", "--sample",
            "--address", f"localhost:{self.door}", "--port", str(self.inside),
        )  # fmt: skip
        self.server, self.out = root / "fed" / "server", root / "run"

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)

    def client(self, number: int) -> Path:
        return self.root / "fed" / "clients" / f"client-{number}"

    def command(self, *arguments: str) -> str:
        done = subprocess.run([SEMIFED, "deploy", *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str, *arguments: str) -> None:
        log = open(self.root / f"{name}.log", "ab")  # noqa: SIM115  the process keeps its own handle
        self.say(f"start {name}")
        command = [SEMIFED, "deploy", *arguments]
        self.running.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        log.close()

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_server(self) -> None:
        before = self.log("server").count("serving 3 clients")
        self.start("server", "server", str(self.server), "--proxy")
        self.until(lambda: self.log("server").count("serving 3 clients") > before, 120, "the server to serve")

    def start_client(self, number: int) -> None:
        self.start(f"client-{number}", "client", str(self.client(number)))

    def online(self) -> int:
        return self.command("status", str(self.server)).count("online")

    def finished(self) -> int:
        path = self.out / "rounds.jsonl"
        return len(path.read_text().splitlines()) - 1 if path.exists() else -1

    def until(self, condition: Any, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (
                f"waited {seconds} s for {what}\n{self.log('server')[-2000:]}\n{self.log('run')[-3000:]}"
            )
            time.sleep(0.3)
        self.say(what)

    def kill(self, *words: str) -> None:
        """SIGKILL to all processes that name this directory and these words, and their groups: no good-bye."""
        for group in {os.getpgid(pid) for pid in self.processes(*words)}:
            os.killpg(group, signal.SIGKILL)
        for process in self.running:
            process.poll()

    def processes(self, *words: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                    home = (entry / "environ").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                ours = str(self.root) in line or f"FLWR_HOME={self.root}" in home
                if ours and all(word in line + home for word in words):
                    found.append(int(entry.name))
        return found


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    here = Federation(tmp_path_factory.mktemp("drill"))
    try:
        here.start_server()
        for number in range(3):
            here.start_client(number)
        here.until(lambda: here.online() == 3, 120, "three clients online")
        yield here
    finally:
        here.kill()
        for process in here.running:
            process.wait(10)


def refused(federation: Federation, name: str, flags: Sequence[str]) -> str:
    """What a node says that must not get in; it either ends, or tries in vain until it is ended."""
    log = federation.root / f"{name}.log"
    command = [SUPERNODE, "--superlink", f"localhost:{federation.door}", "--max-wait-time", "5", *flags]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(federation.root / name)}
    before = federation.online()
    with open(log, "wb") as file:
        node = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            node.wait(25)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    assert federation.online() == before
    text = log.read_text(errors="replace")
    assert "SuperNode ID" not in text
    federation.say(f"{name}: kept out")
    return text


def runtime_port() -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(free_port())]


def test_strangers_are_kept_out(federation: Federation) -> None:
    ca = str(federation.client(0) / "ca.crt")
    refused(federation, "no-key", ["--root-certificates", ca, *runtime_port()])
    stranger = federation.root / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(stranger)], check=True)
    key = ["--auth-supernode-private-key", str(stranger)]
    refused(federation, "unregistered-key", ["--root-certificates", ca, *key, *runtime_port()])
    refused(federation, "plaintext", ["--insecure", *runtime_port()])
    federation.command("init", str(federation.root / "other"), *OPENFL, "--recipe", "quickstart", "--sample")
    wrong = str(federation.root / "other" / "server" / "tls" / "ca.crt")
    own = ["--auth-supernode-private-key", str(federation.client(0) / "key")]
    refused(federation, "wrong-authority", ["--root-certificates", wrong, *own, *runtime_port()])


@pytest.mark.parametrize("path", ["/v1/control/list-runs", "/v1/control/register-node", "/v1/runtime/get-nodes", "/"])
def test_the_door_leads_to_the_fleet_alone(federation: Federation, path: str) -> None:
    context = ssl.create_default_context(cafile=str(federation.client(0) / "ca.crt"))
    address = f"https://localhost:{federation.door}{path}"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(address, data=b"x", method="POST"), context=context, timeout=10)
    with caught.value as answer:
        assert answer.code == 403
    federation.say(f"POST {path} through the proxy: 403")


def test_a_run_survives_the_death_of_a_client_and_of_the_server(federation: Federation) -> None:
    here = federation
    here.start("run", "run", str(here.server), "--out", str(here.out))
    here.until(lambda: here.finished() >= 1, 240, "round 1 finished")
    time.sleep(2)
    here.kill("client-1")
    here.say("client 1 killed in round 2")
    time.sleep(70)  # Flower takes the dead node for alive until then; systemd waits as long
    here.start_client(1)
    here.until(lambda: here.finished() >= 2, 300, "round 2 finished")
    here.kill("fed/server")
    here.kill("deploy run")
    here.say("server killed after round 2")
    kept = here.finished()
    here.start_server()
    here.until(lambda: here.online() == 3, 180, "three clients online again")
    here.start("run", "run", str(here.server), "--out", str(here.out), "--resume")
    here.until(lambda: (here.out / "report.html").exists(), 300, "the run finished")
    assert kept >= 2

    alone = here.root / "alone"
    subprocess.run([SEMIFED, "run", "quickstart", *OPENFL, "--out", str(alone), "--quiet"], check=True)
    found, expected = (load_file(out / "model" / "model.safetensors") for out in (here.out, alone))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    records = [json.loads(line) for line in (here.out / "rounds.jsonl").read_text().splitlines()]
    assert [one["round"] for one in records] == [0, 1, 2, 3]
    assert all(one["clients"] == [0, 1, 2] for one in records[1:])
    here.say("the model is that of an uninterrupted local run, bit for bit")


def test_a_node_that_claims_another_number_is_not_believed(federation: Federation) -> None:
    here = federation
    here.kill("client-2")
    time.sleep(70)
    liar = here.client(2) / "client.toml"
    liar.write_text(liar.read_text().replace("number = 2", "number = 0"))
    recipe = here.server / "recipe.toml"
    recipe.write_text(
        recipe.read_text().replace("min_clients = 3", "min_clients = 2").replace("rounds = 3", "rounds = 1")
    )
    here.start_client(2)
    here.until(lambda: here.online() == 3, 180, "a liar is online")
    out = here.root / "second"
    here.start("second", "run", str(here.server), "--out", str(out))
    here.until(lambda: (out / "report.html").exists(), 300, "the run without the liar finished")
    record = json.loads((out / "rounds.jsonl").read_text().splitlines()[1])
    assert record["clients"] == [0, 1]
    assert record["failures"] == [{"client": 2, "reason": "it is not connected"}]
    assert "says it is client 0, but its key is another one's" in here.log("second")


def test_the_images_stay_where_they_are(federation: Federation) -> None:
    """What the server holds after a run: no image of a client, no name of one of its files."""
    shutil.rmtree(federation.server / "data")
    content = b"".join(path.read_bytes() for path in federation.out.rglob("*") if path.is_file())
    image = next((federation.client(0) / "data" / "unlabelled").glob("*.png"))
    assert image.read_bytes() not in content
