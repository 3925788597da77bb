"""What single clients receive in place of the broadcast: right in every process, counted, and packed once."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from semifed.assembly import Parts
from semifed.client_round import Workplace
from semifed.data.client import Batch, ClientData
from semifed.engines.local import LocalEngine
from semifed.engines.shared_memory import SharedBuffer, read_buffer
from semifed.fit import Fitted, Loss
from semifed.method import Ask, Method
from semifed.net import Net
from semifed.objectives import supervised
from semifed.payloads import Local, Nothing, Server, Visit
from semifed.recipe import Recipe
from semifed.server import ServerSite
from semifed.wire import Weights
from toys import place_of, run_toy, toy_parts, toy_recipe


class Letter(NamedTuple):
    """What travels to a client."""

    weights: Weights
    word: Tensor  # meant for it alone


class Echo(NamedTuple):
    """What travels back."""

    weights: Weights
    samples: Tensor
    word: Tensor


@dataclass(frozen=True, kw_only=True)
class Whispers(Method[Server, Letter, Echo, Letter]):
    """Tells every client but one a word of its own and asks them to repeat it."""

    title: ClassVar[str] = "a method with letters"

    def broadcast(self, server: Server) -> Letter:
        return Letter(server.weights, torch.tensor([-1.0]))

    def round(self, server: Server, ask: Ask[Letter, Echo], site: ServerSite) -> Server:
        down = self.broadcast(server)

        def own(client: int) -> Letter:
            return down if client == 2 else down._replace(word=torch.arange(1.0, 2.0 + client))

        ups = ask(down, own if site.round > 1 else None)
        site.note(words=[up.word.tolist() for up in ups])
        return self.aggregate(server, ups, site)

    def prepare(
        self, net: Net, down: Letter, data: ClientData, kept: Nothing | None, visit: Visit
    ) -> Local[Letter, Nothing]:
        return Local(data, down._replace(word=down.word.sum()), Nothing())

    def loss(self, net: Net, batch: Batch, const: Letter) -> Loss:
        return supervised(net, batch)

    def report(self, net: Net, local: Local[Letter, Nothing], fitted: Fitted) -> Echo:
        return Echo(net.trained(), torch.tensor(1.0), local.const.word)


def whispering(recipe: Recipe) -> Workplace:
    return place_of(toy_parts(recipe))._replace(method=Whispers())


@pytest.mark.parametrize("workers", [1, 2])
def test_every_client_reads_its_own_letter(workers: int) -> None:
    recipe = toy_recipe("fedavg", "clients")
    engine = LocalEngine(partial(whispering, recipe), toy_parts(recipe).scenario, workers)
    try:
        for words in ({1: [1.0, 2.0], 3: [4.0, 5.0, 6.0]}, {0: [7.0]}, {}):  # the buffer grows, then holds old words
            down = Letter(whispering(recipe).net.state(), torch.tensor([-1.0]))
            own = {client: down._replace(word=torch.tensor(word)) for client, word in words.items()}
            heard = [answer.up.word.tolist() for answer in engine.ask(1, 0.05, [0, 1, 2, 3], down, own)]
            assert heard == [sum(words.get(client, [-1.0])) for client in range(4)]
    finally:
        engine.close()


def test_a_round_with_letters_counts_what_each_client_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = toy_recipe("fedavg", "clients", rounds=2, clients_per_round=4)
    monkeypatch.setattr(Recipe, "build_method", lambda self: Whispers())
    parts = toy_parts(recipe)
    found = run_toy(Parts(recipe, Whispers(), parts.scenario), tmp_path / "run")
    assert [line["words"] for line in found.rounds[1:]] == [[-1.0] * 4, [1.0, 3.0, -1.0, 10.0]]
    weights = sum(tensor.numel() * 4 for tensor in found.weights.values())
    assert [line["bytes_down"] - 4 * weights for line in found.rounds[1:]] == [4 * 4, 4 * (1 + 2 + 1 + 4)]


def test_what_letters_share_is_packed_once() -> None:
    buffer = SharedBuffer()
    common, empty = torch.arange(64.0), torch.empty(0, 3)
    payloads = [{"a": common, "b": torch.full((n,), float(n)), "none": empty} for n in (1, 2, 40)]
    layouts, fresh = buffer.write(*payloads)
    assert fresh
    assert len(buffer.memory) == 256 + 64 + 64 + 192
    for payload, layout in zip(payloads, layouts, strict=True):
        found = read_buffer(buffer.memory, layout)
        assert found.keys() == payload.keys()
        assert all(torch.equal(found[name], array) for name, array in payload.items())
    again, fresh = buffer.write(payloads[0])
    assert not fresh
    assert torch.equal(read_buffer(buffer.memory, again[0])["a"], common)
