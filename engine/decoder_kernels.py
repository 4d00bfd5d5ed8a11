"""What a decoder layer computes before its attention and behind it, in one call each.

Everything between two products is done where their rows still are in the processor's cache, and a residual is what a
product is added to. All arrays are float32 and contiguous. Shapes: M rows (tokens), D width of a row, A heads of the
query, H of keys and values, E width of a head, F width between gate and `down`; P panels of PANEL columns, K width of
what is multiplied, L = PANEL; cache H x N x C x E.
"""

import numpy as np
from numba import prange

from engine.fused_kernels import normalize_row
from engine.jit import compiled
from engine.matrix_kernels import add_panel, gate_panel, multiply_panel
from engine.matrix_tiles import PANEL


def prepare() -> None:
    """Compiles the kernels, or loads what was compiled before."""
    row_MD, panels_PKL, cache_HNCE = (
        np.ones((1, PANEL), np.float32),
        np.ones((1, PANEL, PANEL), np.float32),
        np.ones((1, 1, 1, PANEL), np.float32),
    )
    norm, row_MHE, no_bias = (
        (row_MD[0], np.float32(0), np.float32(1)),
        row_MD.reshape(1, 1, PANEL),
        np.empty(0, np.float32),
    )
    product, turns, slot_M = (panels_PKL, no_bias), (row_MD, row_MD), np.zeros(1, np.int64)
    begin(row_MD, norm, (product,) * 3, turns, slot_M, (cache_HNCE,) * 2, (row_MD.copy(), *(row_MHE.copy(),) * 4), 1)
    finish(row_MD, row_MD, product, norm, (panels_PKL,) * 2, product, (row_MD.copy(),) * 2, row_MD.copy(), 1)


@compiled(nogil=True, parallel=True)
def begin(
    rows_MD: np.ndarray,
    norm: tuple[np.ndarray, np.float32, np.float32],
    products: tuple[tuple[np.ndarray, np.ndarray], ...],
    turns_ME: tuple[np.ndarray, np.ndarray],
    slots_M: np.ndarray,
    cache_HNCE: tuple[np.ndarray, np.ndarray],
    room: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    num_threads: int,
) -> None:
    """Writes the turned query, and keys and values of the rows to the cache.

    norm: weight, offset and epsilon. products: panels and bias for query, keys and values; a bias of no length is none.
    turns_ME: cosine and sine. slots_M: chunk * C + offset. room: for normed rows (M x D), the query (M x A x E), keys
    and values (M x H x E), and the turned query, which is the result.
    """
    weight_D, offset, epsilon = norm
    (query_PKL, query_bias), (key_PKL, key_bias), (value_PKL, value_bias) = products
    cosine_ME, sine_ME = turns_ME
    keys_HNCE, values_HNCE = cache_HNCE
    normed_MD, query_MAE, key_MHE, value_MHE, turned_MAE = room
    num_rows, chunk = len(rows_MD), keys_HNCE.shape[2]
    for m in prange(num_rows):
        normalize_row(rows_MD[m], weight_D, offset, epsilon, normed_MD[m])
    query_MN, key_MN, value_MN = (
        query_MAE.reshape(num_rows, -1),
        key_MHE.reshape(num_rows, -1),
        value_MHE.reshape(num_rows, -1),
    )
    first, second, num_panels = len(query_PKL), len(query_PKL) + len(key_PKL), len(query_PKL) + 2 * len(key_PKL)
    num_parts = min(num_panels, num_threads)
    for part in prange(num_parts):
        for p in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            panels_PKL, at, bias_N, out_MN = query_PKL, 0, query_bias, query_MN
            if p >= second:
                panels_PKL, at, bias_N, out_MN = value_PKL, second, value_bias, value_MN
            elif p >= first:
                panels_PKL, at, bias_N, out_MN = key_PKL, first, key_bias, key_MN
            multiply_panel(normed_MD, panels_PKL, p - at, bias_N, out_MN)
    for m in prange(num_rows):
        n, c = slots_M[m] // chunk, slots_M[m] % chunk
        for a in range(query_MAE.shape[1]):
            _turn(query_MAE[m, a], cosine_ME[m], sine_ME[m], turned_MAE[m, a])
        for h in range(key_MHE.shape[1]):
            _turn(key_MHE[m, h], cosine_ME[m], sine_ME[m], keys_HNCE[h, n, c])
            for e in range(value_MHE.shape[2]):
                values_HNCE[h, n, c, e] = value_MHE[m, h, e]


@compiled(nogil=True, parallel=True)
def finish(
    attended_MN: np.ndarray,
    rows_MD: np.ndarray,
    product: tuple[np.ndarray, np.ndarray],
    norm: tuple[np.ndarray, np.float32, np.float32],
    gate: tuple[np.ndarray, np.ndarray],
    down: tuple[np.ndarray, np.ndarray],
    room: tuple[np.ndarray, np.ndarray],
    out_MD: np.ndarray,
    num_threads: int,
) -> None:
    """Writes the layer's rows plus the product of the attention, plus the gated product of the norm of that.

    gate: panels of the gate and of what it opens for. room: for normed rows (M x D) and gated ones (M x F).
    """
    product_PKL, product_bias = product
    weight_D, offset, epsilon = norm
    gate_PKL, up_PKL = gate
    down_PKL, down_bias = down
    normed_MD, gated_MF = room
    num_rows, num_panels = len(rows_MD), len(gate_PKL)
    num_parts = min(len(product_PKL), num_threads)
    for part in prange(num_parts):
        for p in range(len(product_PKL) * part // num_parts, len(product_PKL) * (part + 1) // num_parts):
            column = p * PANEL
            out_MD[:, column : column + PANEL] = rows_MD[:, column : column + PANEL]
            _add_to(attended_MN, product_PKL, p, product_bias, out_MD)
    for m in prange(num_rows):
        normalize_row(out_MD[m], weight_D, offset, epsilon, normed_MD[m])
    num_parts = min(num_panels, num_threads)
    for part in prange(num_parts):
        pair_2ML = np.empty((2, num_rows, PANEL), np.float32)
        for p in range(num_panels * part // num_parts, num_panels * (part + 1) // num_parts):
            gate_panel(normed_MD, gate_PKL, up_PKL, p, pair_2ML, gated_MF)
    num_parts = min(len(down_PKL), num_threads)
    for part in prange(num_parts):
        for p in range(len(down_PKL) * part // num_parts, len(down_PKL) * (part + 1) // num_parts):
            _add_to(gated_MF, down_PKL, p, down_bias, out_MD)


@compiled()
def _add_to(rows_MK: np.ndarray, panels_PKL: np.ndarray, p: int, bias_N: np.ndarray, out_MN: np.ndarray) -> None:
    """Adds the bias and the product to the columns of one panel."""
    num_rows, num_columns = out_MN.shape
    column = p * PANEL
    is_whole = column + PANEL <= num_columns
    out = out_MN.reshape(-1) if is_whole else np.zeros(num_rows * PANEL, np.float32)
    at, step = (column, num_columns) if is_whole else (0, PANEL)
    if len(bias_N) > 0:
        out_MN[:, column : column + PANEL] += bias_N[column : column + PANEL]
    add_panel(rows_MK, panels_PKL, p, out, at, step)
    if not is_whole:
        out_MN[:, column:] += out.reshape(num_rows, PANEL)[:, : num_columns - column]


@compiled()
def _turn(row_E: np.ndarray, cosine_E: np.ndarray, sine_E: np.ndarray, out_E: np.ndarray) -> None:
    """Writes a head turned by its position, first half against second half (Su et al. 2021)."""
    half = len(row_E) // 2
    for e in range(half):
        low, high = row_E[e], row_E[half + e]
        out_E[e] = low * cosine_E[e] - high * sine_E[e]
        out_E[half + e] = high * cosine_E[half + e] + low * sine_E[half + e]
