"""FedSCOMatch: "unknown" as one more class, learnt from a queue of the least known images (SCOMatch, ECCV 2024).

Federated by OpenFL (Appendix A.1): the server learns its labels over K + 1 classes and never sees an unknown; each
client names its own. The queue holds positions of the client's images, persists over rounds and never leaves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from semifed.data.client import Batch, ClientData
from semifed.fit import Loss
from semifed.losses import cross_entropy, masked_mean, mean
from semifed.method import Method, Share
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Down, Local, Prediction, Server, Up, Visit
from semifed.pseudo import PseudoLabels, closed_label, known_confidence, open_label, ratio_threshold, sure_counts

CAPACITY = 256  # of the queue, or 8 a class if that is more


class Memory(NamedTuple):
    """What a client remembers of unknowns."""

    position: Tensor  # [q] of the queued images among its unlabelled ones, oldest first
    score: Tensor  # [q], how known each looked when it was queued
    unknown_threshold: Tensor  # tau_ood
    sure: Tensor = torch.zeros(2, dtype=torch.int64)  # images surely known and surely unknown since tau_ood was set
    seen: Tensor = torch.tensor(0)  # images since then
    checksum: Tensor = torch.tensor(0)  # of the images these positions are of


class Const(NamedTuple):
    """The client's images, and what the step before left behind."""

    data: ClientData
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class FedSCOMatch(Method[Server, Down, Up, Const, Memory]):
    """An open stream over K + 1 classes, a close stream over K, and queued images as labelled unknowns."""

    title: ClassVar[str] = "SCOMatch with labels at the server: unknown is one more class, learnt from a queue"
    heads: ClassVar[Mapping[str, str]] = {"unknown": "linear(1, no-bias)"}
    unknown_score: ClassVar[str] = "probability of unknown as one more class"

    threshold: Share = 0.95  # tau
    unknown_threshold: Share = 0.95  # tau_ood at first, and at most
    least_unknown_threshold: Share = 0.75  # tau_ood at least
    first_share: Share = 0.05  # of a client's images that an empty queue is filled with
    open_weak: bool = False  # weak views in the open stream too (authors' code, all datasets but CIFAR-10)

    def prepare(
        self, net: Net, down: Down, data: ClientData, kept: Memory | None, visit: Visit
    ) -> Local[Const, Memory]:
        checksum = torch.tensor(data.checksum())
        if kept is None or len(kept.position) == 0 or not torch.equal(kept.checksum, checksum):
            score = known_confidence(_with_unknown(data.plain_outputs(net)))
            count = max(1, int(self.first_share * len(score)))  # what exceeds the capacity goes in the first step
            first = score.argsort(stable=True)[:count].flip(0)  # the most known of them leaves the queue first
            kept = Memory(first, score[first], torch.tensor(self.unknown_threshold), checksum=checksum)
        return Local(data, Const(data, kept), kept)

    def loss(self, net: Net, batch: Batch, const: Const) -> Loss:
        if len(batch.unlabelled) == 0:
            return self.server_loss(net, batch)
        (data, memory), stream, at = const, batch.unlabelled.stream("queue"), batch.unlabelled.position
        size = min(len(batch.labelled) or len(batch.unlabelled), CAPACITY)
        drawn = torch.randperm(len(memory.position), generator=stream)[: size if len(memory.position) >= size else 0]
        queued = data.views.weak(data.images[data.unlabelled[memory.position[drawn]]], stream)
        outputs = net.joint(batch.labelled.weak, queued, batch.unlabelled.weak, batch.unlabelled.strong)
        labelled, unknown, weak, strong = map(_with_unknown, outputs)
        unknown_target, queue_used = torch.full_like(drawn, weak.shape[1] - 1), memory.score[drawn] < self.threshold
        open_target, open_used = open_label(weak, self.threshold, memory.unknown_threshold)
        close_target, close_used = closed_label(weak, self.threshold)
        views = [weak, strong] if self.open_weak else [strong]
        open_values = torch.cat([cross_entropy(view, open_target) for view in views])
        terms = {
            "supervised": mean(cross_entropy(labelled, batch.labelled.labels)),
            "queue": masked_mean(cross_entropy(unknown, unknown_target), queue_used),  # L_qood
            "open": masked_mean(open_values, open_used.repeat(len(views))),  # L_open
            "close": masked_mean(cross_entropy(strong[:, :-1], close_target), close_used),  # L_close
        }
        value = torch.stack(list(terms.values())).sum()
        if len(batch.labelled) == 0 and not torch.cat([queue_used, open_used, close_used]).any():
            value = value.detach()  # nothing to learn from: weight decay and momentum alone must not move the model
        after = self._after(memory, at, weak, len(data.unlabelled))
        # An image the open stream takes as known is one of the close stream's too, with the same label.
        return Loss(value, terms, pseudo=PseudoLabels(at, close_target, close_used), carry=Const(data, after))

    def _after(self, memory: Memory, position: Tensor, logits: Tensor, held: int) -> Memory:
        """The memory after a step: one image more in the queue, and a new tau_ood every half pass over the images."""
        capacity = max(8 * (logits.shape[1] - 1), CAPACITY)
        score, least = known_confidence(logits).min(dim=0, keepdim=True)
        queue = torch.cat([memory.position, position[least]])[-capacity:]
        scores = torch.cat([memory.score, score])[-capacity:]
        sure, seen = memory.sure + sure_counts(logits, self.threshold), memory.seen + len(position)
        if 2 * int(seen) < held:
            return memory._replace(position=queue, score=scores, sure=sure, seen=seen)
        anew = ratio_threshold(sure, self.threshold, self.least_unknown_threshold, self.unknown_threshold)
        return Memory(queue, scores, anew, checksum=memory.checksum)

    def keep(self, net: Net, local: Local[Const, Memory], const: Const) -> Memory:
        return const.memory

    def server_loss(self, net: Net, batch: Batch) -> Loss:
        value = mean(cross_entropy(_with_unknown(net(batch.labelled.weak)), batch.labelled.labels))
        return Loss(value, {"supervised": value})

    def predict(self, net: Net, images: Tensor) -> Prediction:
        logits = _with_unknown(net(images))
        return Prediction(logits[:, :-1], logits.softmax(dim=1)[:, -1])


def _with_unknown(output: Output) -> Tensor:
    """Logits of the known classes and, last, of "unknown", [n, K + 1]."""
    return torch.cat([output.logits, output.heads["unknown"]], dim=1)
