"""Digits whose pixels are centred one by one, as the specification's trial had them.

    python results/discovery/centred.py FILE.npz

subtracts from each pixel its mean over the training images, halves what is left and adds 128, so that it is still a
byte: the normalisation of the run removes the 128 again. The cosine of two images is then that of their deviations
from the mean digit. Use it with `semifed run fedlpa/digits-mini dataset=FILE.npz`.
"""

import sys

import numpy as np

from semifed.data.datasets import load


def main() -> None:
    """Write the file."""
    digits = load("digits")
    train, test = digits.x_train.numpy().astype(float), digits.x_test.numpy().astype(float)
    x_train, x_test = (np.round((x - train.mean(axis=0)) / 2 + 128).astype(np.uint8) for x in (train, test))
    np.savez(sys.argv[1], x_train=x_train, y_train=digits.y_train, x_test=x_test, y_test=digits.y_test)


if __name__ == "__main__":
    main()
