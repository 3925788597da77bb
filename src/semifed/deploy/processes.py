"""The processes of a federation: Flower's own binaries, shown before they are started and ended with us."""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from semifed.deploy.consortium import CLIENT, Consortium, read_client, read_consortium
from semifed.deploy.founding import filled
from semifed.durable import write_atomically
from semifed.errors import UserError
from semifed.signals import when_told_to_end

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
NAMES = "names.json"
SET_PARENT_DEATH_SIGNAL = 1  # of prctl
START_SECONDS = 120.0
END_SECONDS = 20.0
Say = Callable[[str], None]


def serve(folder: Path, say: Say, *, proxy: bool) -> int:
    """Flower's SuperLink for one federation, and the proxy before it; until one of them ends or we are told to."""
    consortium = read_consortium(folder)
    tls, home, port = (folder / "tls").absolute(), (folder / "flower").absolute(), consortium.port
    _settle(folder, consortium)
    nginx = shutil.which("nginx")
    if proxy and nginx is None:
        raise UserError("the proxy is nginx, which is not installed; without --proxy only this machine is served")
    if _listening(port):
        raise UserError(f"something listens on 127.0.0.1:{port} already")
    link = [
        _binary("flower-superlink"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--ssl-ca-certfile", str(tls / "ca.crt"), "--ssl-certfile", str(tls / "server.crt")),
        *("--ssl-keyfile", str(tls / "server.key"), "--enable-supernode-auth"),
        *("--disable-runtime-dependency-installation", "--database", str(home / "state.db")),
    ]
    with when_told_to_end(_interrupt), ExitStack() as ending:
        superlink = _start(link, {"FLWR_HOME": str(home)}, say, ending)
        _wait_for(port, superlink)
        for member in consortium.clients:
            _register(folder, member.name, member.key, say)
        started = [superlink]
        if proxy and nginx is not None:
            started.append(_start([nginx, "-c", str((folder / "proxy" / "nginx.conf").absolute())], {}, say, ending))
        say(f"serving {len(consortium.clients)} clients; Ctrl-C ends it")
        return _until_one_ends(started, say)


def join(folder: Path, say: Say) -> int:
    """Flower's SuperNode for one client; until it ends or we are told to."""
    client = read_client(folder)
    for name in ("key", "ca.crt"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: expected this file beside {CLIENT}")
    node = [
        _binary("flower-supernode"),
        *("--superlink", client.server, "--root-certificates", str((folder / "ca.crt").absolute())),
        *("--auth-supernode-private-key", str((folder / "key").absolute())),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", f'partition-id={client.number} folder="{folder.absolute()}"'),
    ]
    with when_told_to_end(_interrupt), ExitStack() as ending:
        home = (folder / "flower").absolute()
        home.mkdir(exist_ok=True)
        return _until_one_ends([_start(node, {"FLWR_HOME": str(home)}, say, ending)], say)


def run(folder: Path, out: Path, say: Say, *, resume: bool) -> bool:
    """One run of the federation's recipe, its lines as they come; whether it was finished."""
    flags = [f'folder="{folder.absolute()}"', f'out="{out.absolute()}"', f"resume={str(resume).lower()}"]
    command = [
        _binary("flwr"),
        "run",
        str((folder / "app").absolute()),
        "here",
        "--run-config",
        " ".join(flags),
        "--stream",
    ]
    before = (out / "summary.json").stat().st_mtime if (out / "summary.json").exists() else 0.0
    with when_told_to_end(_interrupt), ExitStack() as ending:
        process = _start(command, {"FLWR_HOME": str((folder / "flower").absolute())}, say, ending)
        try:
            process.wait()
        except KeyboardInterrupt:  # Flower's own command would only stop listening
            for one in runs(folder):
                if not str(one["status"]).startswith("finished"):
                    say(f"ending run {one['run-id']}")
                    _attempt(folder, "stop", str(one["run-id"]), "here")
            say(f"stopped; finished rounds are kept: go on with --resume --out {out}")
            raise SystemExit(130) from None
    return (out / "summary.json").exists() and (out / "summary.json").stat().st_mtime > before


class Node(NamedTuple):
    """A client as Flower sees it."""

    name: str
    state: str  # registered, online or offline
    since: str


def nodes(folder: Path) -> list[Node]:
    """The registered clients."""
    listed = _listed(folder, "supernode", "list")["nodes"]
    names = _names(folder)
    when = {"online": "online-at", "offline": "offline-at"}
    return sorted(
        Node(names.get(one["node-id"], "?"), one["status"], one[when.get(one["status"], "created-at")])
        for one in listed
    )


def runs(folder: Path) -> list[dict[str, Any]]:
    """The runs there were, as Flower sees them."""
    return list(_listed(folder, "list")["runs"])


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _register(folder: Path, name: str, key: str, say: Say) -> None:
    """Make a client's key known; one that is known already stays so."""
    path = folder / "flower" / f"{name}.pub"
    path.write_text(key + "\n")
    outcome = _attempt(
        folder, "supernode", "register", str(path.absolute()), "here", "--name", name, "--format", "json"
    )
    told = outcome.stdout + outcome.stderr
    found = re.search(r'"node-id": "?(\d+)', told)
    if found is not None:
        write_atomically(folder / "flower" / NAMES, json.dumps({**_names(folder), found[1]: name}))
        say(f"registered {name}")
    elif "already" not in told:
        raise UserError(f"client {name} could not be registered: {told.strip()[-300:]}")


def _names(folder: Path) -> dict[str, str]:
    """Names of clients by Flower's node ids, as told when they were registered."""
    path = folder / "flower" / NAMES
    names: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return names


def _listed(folder: Path, *command: str) -> dict[str, Any]:
    outcome = _attempt(folder, *command, "here", "--format", "json")
    try:
        listed: dict[str, Any] = json.loads(outcome.stdout)
    except json.JSONDecodeError:
        listed = {}
    if not listed.get("success"):
        raise UserError(f"Flower does not answer; is `semifed deploy server {folder}` running?")
    return listed


def _attempt(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    home = {"FLWR_HOME": str((folder / "flower").absolute())}
    command = [_binary("flwr"), *arguments]
    try:
        return subprocess.run(command, env=_environment(home), capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"Flower does not answer within {START_SECONDS:g} s: flwr {arguments[0]}") from None


def _binary(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"{name} is missing: pip install 'semifed[flower]'")
    return found


def _environment(more: dict[str, str]) -> dict[str, str]:
    # Flower starts further programs by name: those of the same installation.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "PATH": path, **more}


def _start(command: Sequence[str], more: dict[str, str], say: Say, ending: ExitStack) -> "subprocess.Popen[bytes]":
    say("$ " + " ".join(command))
    process = subprocess.Popen(command, env=_environment(more), start_new_session=True, preexec_fn=_die_with_parent)
    ending.callback(_end, process)
    return process


def _die_with_parent() -> None:
    """Ask the system to end this process when the one that started it is gone, however it went (Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _interrupt(*_: object) -> None:
    """What was started is ended before we are, who would else leave at once."""
    raise KeyboardInterrupt


def _until_one_ends(started: Sequence["subprocess.Popen[bytes]"], say: Say) -> int:
    try:
        while all(process.poll() is None for process in started):
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
    ended = next(process for process in started if process.poll() is not None)
    say(f"{_name(ended)} ended with code {ended.returncode}")
    return 1


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_SECONDS
    while not _listening(port):
        if process.poll() is not None:
            raise UserError(f"{_name(process)} ended with code {process.returncode}")
        if time.monotonic() > until:
            raise UserError(f"nothing listens on 127.0.0.1:{port} after {START_SECONDS:g} s")
        time.sleep(0.2)


def _name(process: "subprocess.Popen[bytes]") -> str:
    command: Any = process.args
    return Path(command[0]).name


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _settle(folder: Path, consortium: Consortium) -> None:
    """Write what names this folder, wherever it was copied to: the address for Flower's commands, the proxy's file."""
    if set(str(folder.absolute())) & set('"$'):
        raise UserError(f"{folder}: nginx takes no quotes or dollars in paths; choose another place")
    host, _, listen = consortium.address.rpartition(":")
    facts = {"folder": folder.absolute(), "port": consortium.port, "listen": listen, "sixth": ":" in host}
    for path, template in (("flower/config.toml", "flower_config.toml"), ("proxy/nginx.conf", "nginx.conf")):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(filled(template, **facts))
