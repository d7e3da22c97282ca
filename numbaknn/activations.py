"""What is done to an element of a matrix product once its sum is known."""

from __future__ import annotations

import math

from numbaknn.jit import device
from numbaknn.lanes import as_type_of, product

ROOT_OF_A_HALF = math.sqrt(0.5)


@device
def gelu(y):
    """y times the chance that a normal variable is below y; Hendrycks and Gimpel, "Gaussian error linear units",
    arXiv:1606.08415.

    The exact one. By the complement of erf, as 1 + erf has lost all digits where y is a few deviations below zero.
    """
    chance = as_type_of(math.erfc(product(y, as_type_of(-ROOT_OF_A_HALF, y))), y)
    return product(product(as_type_of(0.5, y), y), chance)
