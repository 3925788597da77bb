"""A case built to show FedLPA's prior term: clients that mostly hold one class.

    python results/discovery/imbalanced.py FILE.npz

writes scikit-learn's digits divided among five clients of 150 images, 98 of them (65 %) of the client's main class and
52 of the nine others, as alike as can be. Main classes are 0, 7, 2, 9, 4: three of the known ones, two novel. Use it
with `semifed run fedlpa/digits-mini dataset=FILE.npz scenario.partition=folders`. It is the same for ever; the seed of
a run decides what is labelled and everything after.
"""

import sys

import numpy as np

from semifed.data.datasets import load

MAIN_CLASSES = (0, 7, 2, 9, 4)
MAIN, OTHERS = 98, 52


def main() -> None:
    """Write the file."""
    digits = load("digits")
    labels = digits.y_train.numpy()
    classes = range(len(digits.classes))
    left = {label: list(np.flatnonzero(labels == label)) for label in classes}
    chosen: list[int] = []
    owner: list[int] = []
    for client, favourite in enumerate(MAIN_CLASSES):
        others = [label for label in classes if label != favourite]
        wanted = dict.fromkeys(others, OTHERS // len(others)) | {favourite: MAIN}
        for number in range(OTHERS % len(others)):
            wanted[others[(number + client) % len(others)]] += 1
        for label, count in wanted.items():
            chosen += [left[label].pop() for _ in range(count)]
            owner += [client] * count
    np.savez(
        sys.argv[1],
        x_train=digits.x_train.numpy()[chosen],
        y_train=labels[chosen],
        x_test=digits.x_test.numpy(),
        y_test=digits.y_test.numpy(),
        owner_train=np.array(owner),
    )


if __name__ == "__main__":
    main()
