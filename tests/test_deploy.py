"""Founding a federation, what its parties read, and the apps of server and clients without a network between them."""

import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from PIL import Image

from command import semifed
from local_grid import LocalGrid, run_app
from semifed import __version__
from semifed.assembly import prepare_run
from semifed.data.site import read_site
from semifed.data.views import Views
from semifed.deploy import processes
from semifed.deploy.certificates import client_key, new_authority, public_pem, server_certificate
from semifed.deploy.consortium import read_client, read_consortium, server_parts
from semifed.deploy.founding import fill_with_samples, found, sample_agreement
from semifed.deploy.inspection import what_travels
from semifed.engines import flower
from semifed.engines.flower import deployed_client, deployed_server
from semifed.errors import UserError
from semifed.method import payload_types
from semifed.progress import Lines
from semifed.recipe import Recipe, check_recipe
from semifed.run import execute
from test_flower import model_of, rounds_of
from test_golden import recipe_tables
from toys import Quiet, equal_weights

VIEWS = Views.parse("none", "none", mean=(0.5,), std=(0.5,))


def small_recipe(method: str, **changes: Any) -> Recipe:
    return check_recipe({**recipe_tables(method), "rounds": 2, **changes})


def founded(directory: Path, recipe: Recipe) -> Path:
    found(directory, sample_agreement(recipe, "localhost:8443", 8000))
    fill_with_samples(directory, recipe)
    return directory


def federation(directory: Path, clients: int) -> LocalGrid:
    """A grid whose nodes hold the keys and folders of a founded federation."""
    grid = LocalGrid(deployed_client(), clients)
    consortium = read_consortium(directory / "server")
    for node, client in grid.client_of.items():
        grid.contexts[node].node_config["folder"] = str(directory / "clients" / f"client-{client}")
        grid.keys[node] = public_pem(consortium.clients[client].key)
    return grid


# The same model from folders as from a data set


@pytest.mark.slow
@pytest.mark.parametrize("method", ["openfl", "sage", "fedavg", "flexmatch", "fedlpa"])
def test_a_federation_of_folders_gives_the_model_of_a_local_run(method: str, tmp_path: Path) -> None:
    recipe = small_recipe(method, **({} if method != "fedlpa" else {"scenario": without_validation(method)}))
    fed = founded(tmp_path / "fed", recipe)
    execute(prepare_run(recipe), tmp_path / "local", Quiet())
    run_app(deployed_server(), federation(fed, 4), {"folder": str(fed / "server"), "out": str(tmp_path / "out")})
    assert equal_weights(model_of(tmp_path / "local"), model_of(tmp_path / "out"))
    ours, theirs = rounds_of(tmp_path / "local"), rounds_of(tmp_path / "out")
    assert [one["clients"] for one in ours] == [one["clients"] for one in theirs]
    assert (tmp_path / "out" / "report.html").exists()


def without_validation(method: str) -> dict[str, Any]:
    return {**recipe_tables(method)["scenario"], "validation_fraction": 0.0}


@pytest.mark.slow
def test_an_image_in_both_folders_is_not_grouped_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe("fedlpa", scenario=without_validation("fedlpa"), rounds=1, clients_per_round=4)
    fed = founded(tmp_path / "fed", recipe)
    own = fed / "clients" / "client-0" / "data"
    copied = next((own / "labelled").rglob("*.png"))
    (own / "unlabelled" / "again.png").write_bytes(copied.read_bytes())
    seen = {}
    original = flower.answer

    def watched(letter: Any, data: Any, *others: Any, **options: Any) -> Any:
        seen[letter.facts["client"]] = data
        return original(letter, data, *others, **options)

    monkeypatch.setattr(flower, "answer", watched)
    run_app(deployed_server(), federation(fed, 4), {"folder": str(fed / "server"), "out": str(tmp_path / "out")})
    assert not set(seen[0].labelled.tolist()) & set(seen[0].unlabelled.tolist())
    assert len(seen[0].unlabelled) == len(prepare_run(recipe).scenario.client(0).unlabelled)


@pytest.mark.slow
def test_losses_are_shared_only_by_those_who_say_so(tmp_path: Path) -> None:
    fed = founded(tmp_path / "fed", small_recipe("sage"))
    grid = federation(fed, 4)
    told = {"folder": str(fed / "server"), "out": str(tmp_path / "silent")}
    run_app(deployed_server(), grid, told)
    assert all(one["loss"] == {} for one in rounds_of(tmp_path / "silent"))
    for number in range(4):
        path = fed / "clients" / f"client-{number}" / "client.toml"
        path.write_text(path.read_text().replace('share = "nothing"', 'share = "losses"'))
    run_app(deployed_server(), grid, {**told, "out": str(tmp_path / "open")})
    assert all("supervised" in one["loss"] for one in rounds_of(tmp_path / "open")[1:])
    assert all(one["pseudo"] == {} for one in rounds_of(tmp_path / "open"))
    assert equal_weights(model_of(tmp_path / "silent"), model_of(tmp_path / "open"))


class Cut(Lines):
    """Stops the server as Ctrl-C would."""

    def finished_round(self, record: Any) -> None:
        super().finished_round(record)
        if record["round"] == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_may_be_moved_and_clients_still_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients found what they hold by where the server's run lay, and began anew without a word after it was moved."""
    recipe = small_recipe("flexmatch", rounds=4, clients_per_round=4)
    fed = founded(tmp_path / "fed", recipe)
    told = {"folder": str(fed / "server")}
    execute(prepare_run(recipe), tmp_path / "whole", Quiet())
    with monkeypatch.context() as patch:
        patch.setattr(flower, "Lines", Cut)
        with pytest.raises(KeyboardInterrupt):
            run_app(deployed_server(), federation(fed, 4), {**told, "out": str(tmp_path / "out")})
    (tmp_path / "out").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "again")
    run_app(deployed_server(), federation(fed, 4), {**told, "out": str(tmp_path / "moved"), "resume": True})
    assert equal_weights(model_of(tmp_path / "whole"), model_of(tmp_path / "moved"))
    assert "begins anew" not in capsys.readouterr().out
    shutil.rmtree(fed / "clients" / "client-1" / "state" / "kept")
    run_app(deployed_server(), federation(fed, 4), {**told, "out": str(tmp_path / "again"), "resume": True})
    assert "client 1 has lost what it held: it begins anew" in capsys.readouterr().out


def test_a_node_with_another_key_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed = founded(tmp_path / "fed", small_recipe("fedavg", clients_per_round=4, min_clients=1))
    grid = federation(fed, 4)
    one, other = grid.node_of(0), grid.node_of(1)
    grid.keys[one] = grid.keys[other]
    run_app(deployed_server(), grid, {"folder": str(fed / "server"), "out": str(tmp_path / "out")})
    for record in rounds_of(tmp_path / "out")[1:]:
        assert record["clients"] == [1, 2, 3]
        assert record["failures"] == [{"client": 0, "reason": "it is not connected"}]
    assert "says it is client 0, but its key is another one's" in capsys.readouterr().out


def test_what_goes_wrong_at_a_client_is_told_without_its_file_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fed = founded(tmp_path / "fed", small_recipe("fedavg", clients_per_round=4, min_clients=1))
    secret = fed / "clients" / "client-3" / "data" / "unlabelled" / "patient-smith.png"
    secret.write_bytes(b"no image")
    run_app(deployed_server(), federation(fed, 4), {"folder": str(fed / "server"), "out": str(tmp_path / "out")})
    for record in rounds_of(tmp_path / "out")[1:]:
        assert record["failures"] == [{"client": 3, "reason": "it could not train (UserError; its own log tells more)"}]
    log = capsys.readouterr().err  # the client's own
    assert "patient-smith" in log
    assert "Traceback" not in log, "what a user can put right is told in a line"
    assert "patient-smith" not in (tmp_path / "out" / "report.html").read_text()


def test_a_client_that_cannot_train_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = founded(tmp_path / "fed", small_recipe("fedavg", clients_per_round=4, min_clients=4))
    (fed / "clients" / "client-3" / "data" / "unlabelled" / "broken.png").write_bytes(b"no image")
    clock = SimpleNamespace(sleep=lambda _: pytest.fail("it waited"), monotonic=time.monotonic)
    monkeypatch.setattr("semifed.engines.flower.time", clock)
    told = {"folder": str(fed / "server"), "out": str(tmp_path / "out")}
    with pytest.raises(SystemExit):
        run_app(deployed_server(), federation(fed, 4), told)


def test_a_round_waits_for_its_fewest_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe("fedavg", clients_per_round=4, min_clients=4)
    fed = founded(tmp_path / "fed", recipe)
    grid = federation(fed, 4)
    grid.gone = {2}
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            grid.gone = set()

    clock = SimpleNamespace(sleep=nap, monotonic=time.monotonic)
    monkeypatch.setattr("semifed.engines.flower.time", clock)
    run_app(deployed_server(), grid, {"folder": str(fed / "server"), "out": str(tmp_path / "out")})
    assert len(naps) == 3
    execute(prepare_run(recipe), tmp_path / "local", Quiet())
    assert equal_weights(model_of(tmp_path / "local"), model_of(tmp_path / "out"))


# What is written


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        (("cat", "../dog"), "'../dog' cannot name a folder"),
        (("T-shirt/top", "dog"), "'T-shirt/top' cannot name a folder"),
        ((".hidden", "dog"), "'.hidden' cannot name a folder"),
        (("cat ", "dog"), "'cat ' cannot name a folder"),
        (("cat", "cat"), "'cat' is there twice"),
    ],
)
def test_classes_are_folders(classes: tuple[str, ...], told: str, tmp_path: Path) -> None:
    recipe = small_recipe("fedavg")
    agreed = sample_agreement(recipe, "localhost:8443", 8000)
    with pytest.raises(UserError, match=re.escape(told)):
        found(tmp_path / "fed", agreed._replace(classes=classes))
    assert not (tmp_path / "fed").exists()
    fed = founded(tmp_path / "other", recipe)
    path = fed / "server" / "consortium.toml"
    tables = tomllib.loads(path.read_text()) | {"classes": list(classes)}
    path.write_text(tomli_w.dumps(tables))
    with pytest.raises(UserError, match=re.escape(told)):
        read_consortium(fed / "server")


@pytest.mark.parametrize("method", ["openfl", "fedavg"])
def test_test_images_do_not_decide_how_training_sees_images(method: str, tmp_path: Path) -> None:
    fed = founded(tmp_path / "fed", small_recipe(method))
    path = fed / "server" / "consortium.toml"
    tables = {key: value for key, value in tomllib.loads(path.read_text()).items() if key not in ("mean", "std")}
    path.write_text(tomli_w.dumps(tables))
    before = server_parts(fed / "server").scenario
    for picture in (fed / "server" / "data" / "test").rglob("*.png"):
        Image.new("L", (8, 8), 255).save(picture)
    after = server_parts(fed / "server").scenario
    assert (after.views.mean, after.views.std) == (before.views.mean, before.views.std)
    if method == "fedavg":
        assert after.views.mean == (0.5,)
    else:
        assert after.server is not None
        learnt = after.server.images[after.server.labelled].double() / 255
        assert after.views.mean == pytest.approx([float(learnt.mean())])
        assert after.server.views.mean == after.views.mean


def test_folders_without_images_are_no_classes(tmp_path: Path) -> None:
    fed = founded(tmp_path / "fed", small_recipe("openfl"))
    before = server_parts(fed / "server").scenario.dataset.classes
    for name in (".ipynb_checkpoints", "empty"):
        (fed / "server" / "data" / "test" / name).mkdir()
    (fed / "server" / "data" / "test" / ".ipynb_checkpoints" / "one.png").write_bytes(b"")
    assert server_parts(fed / "server").scenario.dataset.classes == before


def test_paths_with_blanks_and_addresses_of_either_kind_are_served(tmp_path: Path) -> None:
    folder = tmp_path / "my fed"
    for host, served in (("localhost", False), ("[2001:db8::1]", True)):
        consortium = SimpleNamespace(port=8000, address=f"{host}:8443")
        processes._settle(_made(folder), consortium)  # type: ignore[arg-type]
        text = (folder / "proxy" / "nginx.conf").read_text()
        assert f'pid "{folder}/proxy/nginx.pid";' in text
        assert ("listen [::]:8443 ssl;" in text) is served
        assert "listen 8443 ssl;" in text
    with pytest.raises(UserError, match="no quotes or dollars"):
        processes._settle(_made(tmp_path / "a$b"), consortium)  # type: ignore[arg-type]


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_is_ended_at_the_server_too(number: signal.Signals, tmp_path: Path) -> None:
    """Flower's command only listens: the run would go on, and hold its directory."""
    script = f"""
import os, time
from pathlib import Path
from semifed import cli
from semifed.deploy import processes

class Listening:
    def wait(self):
        os.kill(os.getpid(), {int(number)})
        time.sleep(9)

asked = []
processes._binary = lambda name: name
processes._start = lambda *_: Listening()
processes.runs = lambda _: [dict([("run-id", n), ("status", told)]) for n, told in ((7, "running"), (6, "finished:ok"))]
processes._attempt = lambda folder, *words: asked.append(words)
with cli.leaving_at_once():
    try:
        processes.run(Path("fed"), Path({str(tmp_path)!r}), print, resume=False)
    finally:
        print("asked", asked)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "asked [('stop', '7', 'here')]" in told.stdout
    assert "go on with --resume" in told.stdout
    assert told.returncode == 130, told.stderr


@pytest.mark.parametrize("image", ["3,x,64,64", "2,64,64", "3,64", "1,0,8"])
def test_sizes_of_images_are_three_numbers(image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agreed = ["--recipe", "quickstart", "--clients", "a,b", "--classes", "x,y", "--image", image]
    told = semifed(capsys, "deploy", "init", str(tmp_path / "fed"), *agreed)
    assert told.code == 2
    assert "is not three numbers: 1 or 3 channels, height, width" in told.err


def test_hosts_of_any_length_and_no_other_letters(tmp_path: Path) -> None:
    agreed = sample_agreement(small_recipe("fedavg"), f"{'a' * 60}.example:8443", 8000)
    found(tmp_path / "fed", agreed)
    with pytest.raises(UserError, match="not ASCII"):
        found(tmp_path / "other", agreed._replace(address="bücher.example:8443"))


def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    fed = founded(tmp_path / "fed", small_recipe("fedavg"))
    secrets = [
        fed / "authority" / "ca.key",
        fed / "server" / "tls" / "server.key",
        fed / "clients" / "client-0" / "key",
    ]
    assert [stat.S_IMODE(path.stat().st_mode) for path in secrets] == [0o600] * 3
    everything = b"".join(path.read_bytes() for path in (fed / "server").rglob("*") if path.is_file())
    assert (fed / "clients" / "client-0" / "key").read_bytes() not in everything
    assert (fed / "authority" / "ca.key").read_bytes() not in everything


def test_the_certificate_is_for_the_names_clients_use(tmp_path: Path) -> None:
    authority = new_authority("test")
    pair = server_certificate(authority, ["fl.example.org", "192.0.2.7", "localhost"])
    certificate = x509.load_pem_x509_certificate(pair.public)
    certificate.verify_directly_issued_by(authority.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7"]
    path = tmp_path / "both.pem"
    path.write_bytes(pair.private + pair.public)
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(path)


def test_a_key_pair_is_one() -> None:
    pair = client_key()
    private = serialization.load_ssh_private_key(pair.private, None)
    public = private.public_key().public_bytes(  # type: ignore[union-attr]
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert public_pem(pair.public.decode()) == public
    with pytest.raises(UserError, match="is not a public key"):
        public_pem("ssh-nonsense AAAA")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        found(tmp_path, sample_agreement(small_recipe("fedavg"), "localhost:8443", 8000))


@pytest.mark.parametrize("names", [["a", "a", "b", "c"], ["../a", "b", "c", "d"], ["", "b", "c", "d"]])
def test_clients_have_plain_names_of_their_own(names: list[str], tmp_path: Path) -> None:
    agreement = sample_agreement(small_recipe("fedavg"), "localhost:8443", 8000)._replace(members=names)
    with pytest.raises(UserError, match="clients: "):
        found(tmp_path / "fed", agreement)
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("address", ["localhost", ":8443", "localhost:", "localhost:port"])
def test_an_address_has_a_port(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not of the form host:port"):
        found(tmp_path / "fed", sample_agreement(small_recipe("fedavg"), address, 8000))


# What is read


def picture(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), level).save(path)


def test_a_party_reads_its_own_folders(tmp_path: Path) -> None:
    picture(tmp_path / "labelled" / "cat" / "b.png", 10)
    picture(tmp_path / "labelled" / "dog" / "a.png", 20)
    picture(tmp_path / "unlabelled" / "deep" / "x.png", 30)
    picture(tmp_path / "unlabelled" / "again.png", 10)
    data = read_site(tmp_path, ["cat", "dog"], (1, 4, 4), VIEWS)
    assert data.images[data.labelled, 0, 0, 0].tolist() == [20, 10]
    assert data.labels.tolist() == [1, 0]
    assert data.images[data.unlabelled, 0, 0, 0].tolist() == [10, 30]
    assert data.image_count == 3  # the picture in both folders counts once
    assert len(data.apart().unlabelled) == len(data.unlabelled) - 1
    assert data.apart().image_count == 3


def test_decoded_images_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "data" / "unlabelled" / "x.png", 30)
    cache = tmp_path / "images.safetensors"
    first = read_site(tmp_path / "data", [], (1, 4, 4), VIEWS, cache=cache)
    monkeypatch.setattr("semifed.data.site.read_image", lambda *_: pytest.fail("it was decoded again"))
    again = read_site(tmp_path / "data", [], (1, 4, 4), VIEWS, cache=cache)
    assert torch.equal(first.images, again.images)
    monkeypatch.undo()
    picture(tmp_path / "data" / "unlabelled" / "y.png", 40)
    assert len(read_site(tmp_path / "data", [], (1, 4, 4), VIEWS, cache=cache).images) == 2
    cache.write_bytes(b"damaged")
    assert len(read_site(tmp_path / "data", [], (1, 4, 4), VIEWS, cache=cache).images) == 2


def test_mistakes_in_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a folder"):
        read_site(tmp_path / "absent", ["cat"], (1, 4, 4), VIEWS)
    with pytest.raises(UserError, match="found none"):
        read_site(tmp_path, ["cat"], (1, 4, 4), VIEWS)
    picture(tmp_path / "labelled" / "cta" / "b.png", 10)
    with pytest.raises(UserError, match="the consortium knows no class 'cta'; did you mean 'cat'"):
        read_site(tmp_path, ["cat", "dog"], (1, 4, 4), VIEWS)


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("server/consortium.toml", "address", 'adress = "x"\naddress', "adress: unknown key; did you mean 'address'"),
        ("server/recipe.toml", "clients = 4", "clients = 5", "scenario.clients is 5"),
        ("server/recipe.toml", 'name = "fedavg"', 'name = "fedavg-sl"', "it is a bound, for simulations only"),
        (
            "clients/client-0/client.toml",
            "number = 0",
            "number = -1",
            "it must be at least 0",
        ),
        ("clients/client-0/client.toml", '"nothing"', '"everything"', "share: there is no 'everything'"),
    ],
)
def test_mistakes_in_the_agreement_are_told(file: str, old: str, new: str, told: str, tmp_path: Path) -> None:
    fed = founded(tmp_path / "fed", small_recipe("fedavg"))
    text = (fed / file).read_text()
    assert old in text
    (fed / file).write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=told):
        read_client((fed / file).parent) if "client.toml" in file else server_parts(fed / "server")


def test_a_folder_that_is_none_of_ours_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no such file; `semifed deploy init` writes it"):
        server_parts(tmp_path)


# What travels


def fields_of(kind: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = kind._fields
    return names


@pytest.mark.parametrize("method", ["fedavg", "openfl", "proxyfl", "fedmatch", "fedlpa"])
def test_inspect_lists_what_a_method_declares(method: str) -> None:
    parts = prepare_run(small_recipe(method))
    down, up = what_travels(parts)
    _, down_type, up_type, _ = payload_types(parts.method)
    assert {one.name.partition("/")[0] for one in down} <= set(fields_of(down_type))
    assert {"weights", "samples"} <= {one.name.partition("/")[0] for one in up} <= set(fields_of(up_type))
    assert all(one.bytes >= 0 for one in (*down, *up))


def test_the_instructions_name_all_that_must_be_installed(tmp_path: Path) -> None:
    wheel = f"semifed-{__version__}-py3-none-any.whl"
    plain = founded(tmp_path / "plain", small_recipe("sage"))
    assert f"pip install '{wheel}[flower]'" in (plain / "README.md").read_text()
    grouping = founded(tmp_path / "grouping", small_recipe("fedlpa"))
    assert f"pip install '{wheel}[flower,discovery]'" in (grouping / "README.md").read_text()


def test_the_command_founds_and_inspects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["scenario.clients=2", "clients_per_round=2", "--recipe", "quickstart", "--sample"]
    done = semifed(capsys, "deploy", "init", str(tmp_path / "fed"), *few)
    assert done.code == 0
    assert "README.md" in done.out
    shown = semifed(capsys, "deploy", "inspect", str(tmp_path / "fed" / "server"))
    assert shown.code == 0
    assert "weights/classifier.weight" in shown.out
    missing = semifed(capsys, "deploy", "init", str(tmp_path / "other"), "--recipe", "quickstart")
    assert missing.code == 2
    assert "--clients, --classes and --image tell what the parties agreed on" in missing.err
    agreed = [
        "--clients",
        "north,south",
        "--classes",
        "cat,dog",
        "--image",
        "3,32,32",
        "--address",
        "fl.example.org:443",
    ]
    real = semifed(capsys, "deploy", "init", str(tmp_path / "real"), "--recipe", "quickstart", *agreed)
    assert real.code == 0
    assert [one.name for one in read_consortium(tmp_path / "real" / "server").clients] == ["north", "south"]


def test_a_server_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed = founded(tmp_path / "fed", small_recipe("fedavg"))
    outcome = semifed(capsys, "deploy", "status", str(fed / "server"))
    assert outcome.code == 2
    assert "Flower does not answer" in outcome.err
