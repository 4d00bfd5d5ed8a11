"""What a decoder layer computes before its attention and behind it, in one call each.

Everything between two products is done where their rows still are in the processor's cache, and a residual is what a
product is added to. Few rows are multiplied by all threads, each with panels of its own; of many, each thread takes
some through all of a layer, in blocks that stay near it.

All arrays are float32 and contiguous. Shapes: M rows (tokens), D width of a row, A heads of the query, H of keys and
values, E width of a head, F width between gate and `down`; P panels of PANEL columns, K width of what is multiplied,
L = PANEL; S threads; cache H x N x C x E.
"""

import numpy as np
from numba import prange

from engine.fused_kernels import normalize_row
from engine.jit import compiled
from engine.matrix_kernels import add_panel, gate_panel, multiply_panel
from engine.matrix_tiles import PANEL

MIN_ROWS_OF_A_THREAD = 96
"""From so many on a thread reads all weights of a layer in less time than it multiplies with them."""
BLOCK = 128
"""Rows that a thread takes through a layer at once: what is between gate and `down` stays near."""


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
    room_SMD = row_MHE.copy()
    begin(row_MD, norm, (product,) * 3, turns, slot_M, (cache_HNCE,) * 2, (room_SMD, *(row_MHE.copy(),) * 4), 1)
    finish(row_MD, row_MD, product, norm, (panels_PKL,) * 2, product, (room_SMD, row_MD.copy()), row_MD.copy(), 1)


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
    turns_ME: cosine and sine. slots_M: chunk * C + offset. room: for normed rows (S x M x D), the query (M x A x E),
    keys and values (M x H x E), and the turned query, which is the result.
    """
    # One by one, and put together again inside: a loop over threads takes no tuples.
    weight_D, offset, epsilon = norm
    (query_PKL, query_bias), (key_PKL, key_bias), (value_PKL, value_bias) = products
    cosine_ME, sine_ME = turns_ME
    keys_HNCE, values_HNCE = cache_HNCE
    normed_SMD, query_MAE, key_MHE, value_MHE, turned_MAE = room
    are_many = len(rows_MD) >= MIN_ROWS_OF_A_THREAD * num_threads
    num_parts = num_threads if are_many else min(len(query_PKL) + 2 * len(key_PKL), num_threads)
    for phase in range(1 if are_many else 2):
        for part in prange(num_parts):
            work = (num_parts, part, -1 if are_many else phase)
            all_products = (query_PKL, query_bias), (key_PKL, key_bias), (value_PKL, value_bias)
            some_room = (normed_SMD[part], query_MAE, key_MHE, value_MHE, turned_MAE)
            turns, cache = (cosine_ME, sine_ME), (keys_HNCE, values_HNCE)
            _begin_part(work, rows_MD, (weight_D, offset, epsilon), all_products, turns, slots_M, cache, some_room)


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

    gate: panels of the gate and of what it opens for. room: for normed rows (S x M x D) and gated ones (M x F).
    """
    product_PKL, product_bias = product
    weight_D, offset, epsilon = norm
    gate_PKL, up_PKL = gate
    down_PKL, down_bias = down
    normed_SMD, gated_MF = room
    are_many = len(rows_MD) >= MIN_ROWS_OF_A_THREAD * num_threads
    num_parts = num_threads if are_many else min(len(product_PKL), len(gate_PKL), num_threads)
    for phase in range(1 if are_many else 3):
        for part in prange(num_parts):
            work = (num_parts, part, -1 if are_many else phase)
            numbers, some_room = (weight_D, offset, epsilon), (normed_SMD[part], gated_MF)
            products = (product_PKL, product_bias), (down_PKL, down_bias)
            _finish_part(work, attended_MN, rows_MD, products, numbers, (gate_PKL, up_PKL), some_room, out_MD)


@compiled()
def _begin_part(
    work: tuple[int, int, int],
    rows_MD: np.ndarray,
    norm: tuple[np.ndarray, np.float32, np.float32],
    products: tuple[tuple[np.ndarray, np.ndarray], ...],
    turns_ME: tuple[np.ndarray, np.ndarray],
    slots_M: np.ndarray,
    cache_HNCE: tuple[np.ndarray, np.ndarray],
    room: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Does the part of one thread.

    work: the number of parts, which of them, and what is to be done: everything with some rows (-1), or one phase of
    it with all rows and some panels.
    """
    num_parts, part, phase = work
    normed_MD, query_MAE, key_MHE, value_MHE, turned_MAE = room
    num_rows, num_panels = len(rows_MD), len(products[0][0]) + 2 * len(products[1][0])
    query_MN, key_MN, value_MN = (
        query_MAE.reshape(num_rows, -1),
        key_MHE.reshape(num_rows, -1),
        value_MHE.reshape(num_rows, -1),
    )
    heads = (query_MAE, key_MHE, value_MHE, turned_MAE)
    some_rows = _share(num_rows, part, num_parts)
    if phase == 1:
        _store(some_rows, heads, turns_ME, slots_M, cache_HNCE)
        return
    some = _share(num_panels, part, num_parts) if phase == 0 else (0, num_panels)
    first, last = some_rows if phase < 0 else (0, num_rows)
    num_blocks = (last - first + BLOCK - 1) // BLOCK if phase < 0 else 1
    for block in range(num_blocks):
        low = first + (last - first) * block // num_blocks
        high = first + (last - first) * (block + 1) // num_blocks
        # Each thread norms what it multiplies: for few rows that takes less time than to wait for each other.
        _normalize(rows_MD[low:high], norm, normed_MD[: high - low])
        _project(normed_MD[: high - low], products, some, (query_MN[low:high], key_MN[low:high], value_MN[low:high]))
        if phase < 0:
            _store((low, high), heads, turns_ME, slots_M, cache_HNCE)


@compiled()
def _finish_part(
    work: tuple[int, int, int],
    attended_MN: np.ndarray,
    rows_MD: np.ndarray,
    products: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    norm: tuple[np.ndarray, np.float32, np.float32],
    gate: tuple[np.ndarray, np.ndarray],
    room: tuple[np.ndarray, np.ndarray],
    out_MD: np.ndarray,
) -> None:
    """Does the part of one thread; see `_begin_part`. products: that of the attention, and the last one."""
    num_parts, part, phase = work
    product, down = products
    normed_MD, gated_MF = room
    num_rows, num_panels, num_gates, num_downs = len(rows_MD), len(product[0]), len(gate[0]), len(down[0])
    first, last, panels, gates, downs = 0, num_rows, (0, num_panels), (0, num_gates), (0, num_downs)
    num_blocks = 1
    if phase < 0:
        first, last = _share(num_rows, part, num_parts)
        num_blocks = (last - first + BLOCK - 1) // BLOCK
    else:
        panels, gates = _share(num_panels, part, num_parts), _share(num_gates, part, num_parts)
        downs = _share(num_downs, part, num_parts)
    for block in range(num_blocks):
        low = first + (last - first) * block // num_blocks
        high = first + (last - first) * (block + 1) // num_blocks
        # The gated rows of a block lie where those of the last one did, near the processor.
        out_BD, gated_BF = out_MD[low:high], gated_MF[first : first + high - low]
        if phase <= 0:
            _add_attended(attended_MN[low:high], rows_MD[low:high], product, panels, (gate[0], gates[0]), out_BD)
        if phase < 0 or phase == 1:
            _gate(out_BD, norm, gate, gates, (down[0], downs[0]), normed_MD[: high - low], gated_BF)
        if phase < 0 or phase == 2:
            _add_down(gated_BF, down, downs, (product[0], panels[0]), out_BD)


@compiled()
def _share(count: int, part: int, num_parts: int) -> tuple[int, int]:
    """Gives the first of so many things that are a part's, and the first that is the next one's."""
    return count * part // num_parts, count * (part + 1) // num_parts


@compiled()
def _normalize(rows_MD: np.ndarray, norm: tuple[np.ndarray, np.float32, np.float32], normed_MD: np.ndarray) -> None:
    weight_D, offset, epsilon = norm
    for m in range(len(rows_MD)):
        normalize_row(rows_MD[m], weight_D, offset, epsilon, normed_MD[m])


@compiled()
def _project(
    normed_MD: np.ndarray,
    products: tuple[tuple[np.ndarray, np.ndarray], ...],
    some: tuple[int, int],
    outs_MN: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Writes columns of query, keys and values: those of some panels, counted through all three."""
    (query_PKL, query_bias), (key_PKL, key_bias), (value_PKL, value_bias) = products
    second, third = len(query_PKL), len(query_PKL) + len(key_PKL)
    for p in range(some[0], some[1]):
        panels_PKL, at, bias_N, out_MN = query_PKL, 0, query_bias, outs_MN[0]
        if p >= third:
            panels_PKL, at, bias_N, out_MN = value_PKL, third, value_bias, outs_MN[2]
        elif p >= second:
            panels_PKL, at, bias_N, out_MN = key_PKL, second, key_bias, outs_MN[1]
        later = min(p + 1, some[1] - 1)
        ahead = (query_PKL, later)
        if later >= third:
            ahead = (value_PKL, later - third)
        elif later >= second:
            ahead = (key_PKL, later - second)
        multiply_panel(normed_MD, panels_PKL, p - at, ahead, bias_N, out_MN)


@compiled()
def _store(
    rows: tuple[int, int],
    heads_MAE: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    turns_ME: tuple[np.ndarray, np.ndarray],
    slots_M: np.ndarray,
    cache_HNCE: tuple[np.ndarray, np.ndarray],
) -> None:
    """Turns the query of rows, and writes their keys and values to the cache."""
    query_MAE, key_MHE, value_MHE, turned_MAE = heads_MAE
    cosine_ME, sine_ME = turns_ME
    keys_HNCE, values_HNCE = cache_HNCE
    chunk = keys_HNCE.shape[2]
    for m in range(rows[0], rows[1]):
        n, c = slots_M[m] // chunk, slots_M[m] % chunk
        for a in range(query_MAE.shape[1]):
            _turn(query_MAE[m, a], cosine_ME[m], sine_ME[m], turned_MAE[m, a])
        for h in range(key_MHE.shape[1]):
            _turn(key_MHE[m, h], cosine_ME[m], sine_ME[m], keys_HNCE[h, n, c])
            for e in range(value_MHE.shape[2]):
                values_HNCE[h, n, c, e] = value_MHE[m, h, e]


@compiled()
def _add_attended(
    attended_MN: np.ndarray,
    rows_MD: np.ndarray,
    product: tuple[np.ndarray, np.ndarray],
    some: tuple[int, int],
    ahead: tuple[np.ndarray, int],
    out_MD: np.ndarray,
) -> None:
    """Writes some panels' columns of the rows plus the product of the attention."""
    panels_PKL, bias_N = product
    for p in range(some[0], some[1]):
        column = p * PANEL
        out_MD[:, column : column + PANEL] = rows_MD[:, column : column + PANEL]
        _add_to(attended_MN, panels_PKL, p, (panels_PKL, p + 1) if p + 1 < some[1] else ahead, bias_N, out_MD)


@compiled()
def _gate(
    rows_MD: np.ndarray,
    norm: tuple[np.ndarray, np.float32, np.float32],
    gate: tuple[np.ndarray, np.ndarray],
    some: tuple[int, int],
    ahead: tuple[np.ndarray, int],
    normed_MD: np.ndarray,
    gated_MF: np.ndarray,
) -> None:
    """Writes some panels' columns of the gated product of the norm of rows."""
    gate_PKL, up_PKL = gate
    _normalize(rows_MD, norm, normed_MD)
    pair_2ML = np.empty((2, len(rows_MD), PANEL), np.float32)
    for p in range(some[0], some[1]):
        after = (gate_PKL, p + 1) if p + 1 < some[1] else ahead
        gate_panel(normed_MD, gate_PKL, up_PKL, p, after, pair_2ML, gated_MF)


@compiled()
def _add_down(
    gated_MF: np.ndarray,
    down: tuple[np.ndarray, np.ndarray],
    some: tuple[int, int],
    ahead: tuple[np.ndarray, int],
    out_MD: np.ndarray,
) -> None:
    """Adds some panels' columns of the last product."""
    panels_PKL, bias_N = down
    for p in range(some[0], some[1]):
        _add_to(gated_MF, panels_PKL, p, (panels_PKL, p + 1) if p + 1 < some[1] else ahead, bias_N, out_MD)


@compiled()
def _add_to(
    rows_MK: np.ndarray,
    panels_PKL: np.ndarray,
    p: int,
    ahead: tuple[np.ndarray, int],
    bias_N: np.ndarray,
    out_MN: np.ndarray,
) -> None:
    """Adds the bias and the product to the columns of one panel."""
    num_rows, num_columns = out_MN.shape
    column = p * PANEL
    is_whole = column + PANEL <= num_columns
    out = out_MN.reshape(-1) if is_whole else np.zeros(num_rows * PANEL, np.float32)
    at, step = (column, num_columns) if is_whole else (0, PANEL)
    if len(bias_N) > 0:
        out_MN[:, column : column + PANEL] += bias_N[column : column + PANEL]
    add_panel(rows_MK, panels_PKL, p, ahead, out, at, step)
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
