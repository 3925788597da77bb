"""CBAFed's residual connection: now and then a model goes back most of the way to what it was at the last one."""

from collections.abc import Callable

from semifed.aggregate import moving_average
from semifed.net import Net


def residual_connection(net: Net, epoch: int, every: int, persistence: float) -> Callable[[int], None]:
    """What to do after each step of training, given the number of steps so far and in an epoch.

    The weights after the first epoch are the record. Each time `every` more epochs are done, the network and the record
    become persistence · record + (1 − persistence) · network.
    """
    record = net.state()

    def connect(steps: int) -> None:
        nonlocal record
        since = steps - epoch
        if since == 0:
            record = net.state()
        elif since > 0 and since % (every * epoch) == 0:
            record = moving_average(record, net.state(), persistence)
            net.load(record)

    return connect
