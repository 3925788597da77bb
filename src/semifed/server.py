"""The server's own workplace: its labelled images, if it has any, and training on them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from semifed.aggregate import moving_average
from semifed.data.client import Batch, Budget, ClientData, batches, steps_per_epoch
from semifed.fit import Diverged, Loss, Optimiser, fit
from semifed.models.network import Output
from semifed.net import Net
from semifed.rng import torch_stream
from semifed.wire import Weights, all_finite

WARM_UP, FINE_TUNE = "warm-up", "fine-tune"


class ServerSite:
    """What `setup` and `aggregate` may use; `round` and `lr` are set by the round loop."""

    def __init__(
        self,
        net: Net,
        labelled: ClientData | None,
        optimiser: Optimiser,
        *,
        batch: int,
        warmup_epochs: int,
        finetune_epochs: int,
        rounds: int,
        seed: int,
    ) -> None:
        self.net = net
        self.labelled = None if labelled is None else labelled.on(net.device)
        self.round = 0
        self.rounds = rounds
        self.lr = optimiser.lr
        self.notes: dict[str, object] = {}
        self.tell: Callable[[str, int, int], None] = lambda *_: None  # who waits, how far a long training is
        self._optimiser = optimiser
        self._batch = batch
        self._warmup_epochs = warmup_epochs
        self._finetune_epochs = finetune_epochs
        self._seed = seed

    def warm_up(self, weights: Weights, loss: Callable[[Net, Batch], Loss]) -> Weights:
        """Weights after the server's training before the first round; unchanged if it holds no labels."""
        return self._train(weights, loss, self._warmup_epochs, WARM_UP)

    def fine_tune(
        self,
        weights: Weights,
        loss: Callable[[Net, Batch], Loss],
        after_epoch: Callable[[Weights], None] = lambda _: None,
    ) -> Weights:
        """Weights after the server's training within a round; unchanged if it holds no labels."""
        return self._train(weights, loss, self._finetune_epochs, FINE_TUNE, after_epoch)

    def averaged(self, average: Weights, weights: Weights, decay: float) -> Weights:
        """The moving average over rounds after one more; an untrained start counts for nothing."""
        untrained = self.round == 1 and (self.labelled is None or self._warmup_epochs == 0)
        return moving_average(weights if untrained else average, weights, decay)

    def recalibrated(self, weights: Weights) -> Weights:
        """The same weights with batch-norm statistics of the server's own, un-augmented images."""
        if self.labelled is None or self.net.batchnorm != "static":
            return weights
        self.net.load(weights)
        self.net.recalibrate(self.plain_images())
        return self.net.state()

    def plain_images(self) -> Tensor:
        """The server's labelled images, un-augmented and normalised."""
        if self.labelled is None:
            return torch.empty(0)
        return self.labelled.views.plain(self.labelled.images[self.labelled.labelled])

    @torch.no_grad()
    def outputs(self, weights: Weights) -> Output | None:
        """What a network with these weights says of the server's images, un-augmented; None if it has none."""
        if self.labelled is None:
            return None
        self.net.load(weights)
        return self.labelled.labelled_outputs(self.net)

    def stream(self, purpose: str) -> torch.Generator:
        """A random stream of this round for the server."""
        return torch_stream(self._seed, self.round, "server", purpose)

    def note(self, **facts: object) -> None:
        """Hand diagnostics to this round's record."""
        self.notes |= facts

    def _train(
        self,
        weights: Weights,
        loss: Callable[[Net, Batch], Loss],
        epochs: int,
        purpose: str,
        after_epoch: Callable[[Weights], None] = lambda _: None,
    ) -> Weights:
        labelled = self.labelled
        if labelled is None:
            return weights
        self.net.load(weights)
        kept = {}
        if purpose == FINE_TUNE and self.net.batchnorm == "averaged":
            kept = {name: weights[name] for name in self.net.statistics_names()}
        budget = Budget(epochs=epochs, steps=None, batch=self._batch)
        address = (self._seed, self.round, "server", purpose)
        per_epoch = steps_per_epoch(len(labelled.labelled), self._batch)

        def steps() -> Iterator[Batch]:
            for count, batch in enumerate(batches(labelled, budget, address), start=1):
                yield batch  # the loop comes back for the next batch when this one's step is done
                if count % per_epoch == 0:
                    after_epoch(self.net.state() | kept)
                    if purpose == WARM_UP:
                        self.tell(WARM_UP, count // per_epoch, epochs)

        fitted = fit(self.net, steps(), loss, self._optimiser._replace(lr=self.lr))
        self.note(server_loss=fitted.terms)
        trained = self.net.state() | kept
        if not all_finite(trained.values()):  # the loss was looked at before the last step, not after it
            raise Diverged("weights became infinite or no numbers in the last step")
        return self.recalibrated(trained)
