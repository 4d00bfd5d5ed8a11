"""Compiling of small numeric functions by numba, for CPUs. Its threads are torch's: both use the process's OpenMP.

Whoever imports this module loads numba and its compiler; on a GPU nobody does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit, set_num_threads

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums in any order, as in every other kernel; infinities and NaN keep their meaning."""

LOG2_E = np.float32(1.4426950408889634)
LEAST_EXPONENT = np.float32(-87.0)
"""e to this is about the smallest normal float32."""
POWER_OF_TWO = tuple(
    map(np.float32, (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1))
)
"""The Taylor series of 2^f, the highest power first."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function at its first call and keeps the result on disk, where a folder for it can be written."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = njit(fastmath=FAST, cache=True, **options)(function)
        except RuntimeError:  # neither the function's folder nor a cache folder of the user can be written
            made = njit(fastmath=FAST, **options)(function)
        return made

    return make


def use_threads(num_threads: int) -> None:
    """Sets how many threads the calls of this thread take."""
    set_num_threads(min(num_threads, config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]  # set at import


@compiled(inline="always")
def exponential(x: np.float32) -> np.float32:
    """Gives e^x for x <= 0, to within (3 + |x|) 1e-7 of its value, and NaN for NaN.

    The library's function takes one number at a time; of this arithmetic the compiler makes eight at a time. 2^n goes
    into the bits of the exponent, 2^f is for f in [-0.5, 0.5].
    """
    y = (LEAST_EXPONENT if x < LEAST_EXPONENT else x) * LOG2_E
    n = np.floor(y + np.float32(0.5))
    f = y - n
    p = POWER_OF_TWO[0]
    p = p * f + POWER_OF_TWO[1]
    p = p * f + POWER_OF_TWO[2]
    p = p * f + POWER_OF_TWO[3]
    p = p * f + POWER_OF_TWO[4]
    p = p * f + POWER_OF_TWO[5]
    p = p * f + POWER_OF_TWO[6]
    power: np.float32 = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    result: np.float32 = p * power
    return result
