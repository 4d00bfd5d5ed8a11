"""The small work between the matrix products of a layer, each in one pass over memory instead of four to eight.

All arrays are float32 and contiguous. Shapes: N rows, D width of a row, T tokens, A heads.
"""

import numpy as np
from numba import prange

from engine.jit import compiled, exponential


def prepare() -> None:
    """Compiles the kernels, or loads what was compiled before."""
    row_ND, row_TAD = np.ones((1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    normalize(row_ND, row_ND[0], np.float32(0), np.float32(1), row_ND)
    gate(row_ND, row_ND)
    rotate(row_TAD, row_ND, row_ND, row_TAD)


@compiled(nogil=True, parallel=True)
def normalize(
    rows_ND: np.ndarray, weight_D: np.ndarray, offset: np.float32, epsilon: np.float32, out_ND: np.ndarray
) -> None:
    """Writes rows over their root mean square, times offset plus weight (Zhang and Sennrich 2019)."""
    for n in prange(len(rows_ND)):
        normalize_row(rows_ND[n], weight_D, offset, epsilon, out_ND[n])


@compiled()
def normalize_row(
    row_D: np.ndarray, weight_D: np.ndarray, offset: np.float32, epsilon: np.float32, out_D: np.ndarray
) -> None:
    """Does that for one row."""
    total = np.float32(0)
    for d in range(len(row_D)):
        total += row_D[d] * row_D[d]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(row_D)) + epsilon)
    for d in range(len(row_D)):
        out_D[d] = row_D[d] * factor * (offset + weight_D[d])


@compiled(nogil=True, parallel=True)
def gate(gate_ND: np.ndarray, up_ND: np.ndarray) -> None:
    """Turns `gate` into x / (1 + e^-x) times `up`, in place."""
    for n in prange(len(gate_ND)):
        for d in range(gate_ND.shape[1]):
            x = gate_ND[n, d]
            # e to a negative number alone, so that nothing overflows: 1 / (1 + e^-x) is e^x / (1 + e^x).
            e = exponential(-abs(x))
            share = (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)
            gate_ND[n, d] = x * share * up_ND[n, d]


@compiled(nogil=True, parallel=True)
def rotate(rows_TAD: np.ndarray, cosine_TD: np.ndarray, sine_TD: np.ndarray, out_TAD: np.ndarray) -> None:
    """Writes heads turned by their position, first half against second half (Su et al. 2021)."""
    num_heads, width = rows_TAD.shape[1:]
    half = width // 2
    for t in prange(len(rows_TAD)):
        for a in range(num_heads):
            for d in range(half):
                low, high = rows_TAD[t, a, d], rows_TAD[t, a, half + d]
                out_TAD[t, a, d] = low * cosine_TD[t, d] - high * sine_TD[t, d]
                out_TAD[t, a, half + d] = high * cosine_TD[t, half + d] + low * sine_TD[t, half + d]
