"""Products of rows and a layer's weights on a CPU, near what it can multiply from a few rows on.

Each thread takes panels of weights and multiplies all rows with one before it goes to the next: a panel stays in the
second level of the processor's cache, and the weights come from memory once.

All arrays are float32 and contiguous. Shapes: M rows, K their width, N columns; P panels of PANEL columns, L = PANEL.
"""

import numpy as np
from numba import prange

from engine.jit import compiled, exponential
from engine.matrix_tiles import HEIGHT, PANEL, add_tile

DEPTH = 512
"""Of K at once, at most: so much of a panel and of a tile's rows stays near, and sums of sums round less."""


def prepare() -> None:
    """Compiles the kernels, or loads what was compiled before."""
    rows_MK, panels_PKL, out_MN = (
        np.ones((1, 1), np.float32),
        np.ones((1, 1, PANEL), np.float32),
        np.ones((1, 1), np.float32),
    )
    multiply(rows_MK, panels_PKL, out_MN[0], out_MN, 1)
    multiply_gated(rows_MK, panels_PKL, panels_PKL, out_MN, 1)
    pack(np.ones((1, 1), np.float32), panels_PKL)


@compiled(nogil=True)
def pack(weight_NK: np.ndarray, panels_PKL: np.ndarray) -> None:
    """Writes a weight in panels, the last one filled with zeros; in one thread, as it runs beside generation."""
    num_columns, width = weight_NK.shape
    for p in range(len(panels_PKL)):
        column = p * PANEL
        if column + PANEL <= num_columns:
            for k in range(width):
                for n in range(PANEL):
                    panels_PKL[p, k, n] = weight_NK[column + n, k]
        else:
            panels_PKL[p] = np.float32(0)
            for n in range(num_columns - column):
                panels_PKL[p, :, n] = weight_NK[column + n]


@compiled(nogil=True, parallel=True)
def multiply(
    rows_MK: np.ndarray, panels_PKL: np.ndarray, bias_N: np.ndarray, out_MN: np.ndarray, num_threads: int
) -> None:
    """Writes the product plus the bias; a bias of no length is none."""
    num_panels = len(panels_PKL)
    num_parts = min(num_panels, num_threads)
    for part in prange(num_parts):
        last = num_panels * (part + 1) // num_parts
        for p in range(num_panels * part // num_parts, last):
            multiply_panel(rows_MK, panels_PKL, p, (panels_PKL, min(p + 1, last - 1)), bias_N, out_MN)


@compiled(nogil=True, parallel=True)
def multiply_gated(
    rows_MK: np.ndarray, gate_PKL: np.ndarray, up_PKL: np.ndarray, out_MN: np.ndarray, num_threads: int
) -> None:
    """Writes x / (1 + e^-x) of the product with the gate, times the product with `up`."""
    num_panels = len(gate_PKL)
    num_parts = min(num_panels, num_threads)
    for part in prange(num_parts):
        pair_2ML = np.empty((2, len(rows_MK), PANEL), np.float32)
        last = num_panels * (part + 1) // num_parts
        for p in range(num_panels * part // num_parts, last):
            gate_panel(rows_MK, gate_PKL, up_PKL, p, (gate_PKL, min(p + 1, last - 1)), pair_2ML, out_MN)


@compiled()
def multiply_panel(
    rows_MK: np.ndarray,
    panels_PKL: np.ndarray,
    p: int,
    ahead: tuple[np.ndarray, int],
    bias_N: np.ndarray,
    out_MN: np.ndarray,
) -> None:
    """Writes the columns of one panel; ahead: the panel that is read next."""
    num_rows, num_columns = out_MN.shape
    column = p * PANEL
    is_whole = column + PANEL <= num_columns
    out = out_MN.reshape(-1) if is_whole else np.empty(num_rows * PANEL, np.float32)
    at, step = (column, num_columns) if is_whole else (0, PANEL)
    _fill(out, at, step, num_rows, bias_N[column : column + PANEL])
    # In one place: each is compiled anew.
    add_panel(rows_MK, panels_PKL, p, ahead, out, at, step)
    if not is_whole:
        out_MN[:, column:] = out.reshape(num_rows, PANEL)[:, : num_columns - column]


@compiled()
def gate_panel(
    rows_MK: np.ndarray,
    gate_PKL: np.ndarray,
    up_PKL: np.ndarray,
    p: int,
    ahead: tuple[np.ndarray, int],
    pair_2ML: np.ndarray,
    out_MN: np.ndarray,
) -> None:
    """Writes the gated columns of one panel; pair_2ML is room to work in, ahead the panel that is read next."""
    num_rows, num_columns = out_MN.shape
    gate_ML, up_ML, column = pair_2ML[0], pair_2ML[1], p * PANEL
    pair_2ML[:, :num_rows] = np.float32(0)
    for i, panels_PKL in enumerate((gate_PKL, up_PKL)):
        add_panel(rows_MK, panels_PKL, p, ahead if i else (up_PKL, p), pair_2ML[i].reshape(-1), 0, PANEL)
    for m in range(num_rows):
        for n in range(min(PANEL, num_columns - column)):
            x = gate_ML[m, n]
            # e to a negative number alone, so that nothing overflows: 1 / (1 + e^-x) is e^x / (1 + e^x).
            e = exponential(-abs(x))
            share = (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)
            out_MN[m, column + n] = x * share * up_ML[m, n]


@compiled()
def _fill(out: np.ndarray, at: int, step: int, num_rows: int, bias_L: np.ndarray) -> None:
    for m in range(num_rows):
        for n in range(PANEL):
            out[at + m * step + n] = np.float32(0)
        for n in range(len(bias_L)):
            out[at + m * step + n] = bias_L[n]


@compiled()
def add_panel(
    rows_MK: np.ndarray,
    panels_PKL: np.ndarray,
    p: int,
    ahead: tuple[np.ndarray, int],
    out: np.ndarray,
    at: int,
    step: int,
) -> None:
    """Adds the product with one panel to a tile of a flat array: it begins `at`, its rows are `step` apart.

    Each part of the panel is multiplied while the next one comes from memory, that of the panel `ahead` at last: a
    core that waits for its weights would multiply 16 to 64 rows at half of its speed.
    """
    num_rows, width = rows_MK.shape
    rows, panels = rows_MK.reshape(-1), panels_PKL.reshape(-1)
    ahead_PKL, ahead_p = ahead
    num_tiles, num_depths = (num_rows + HEIGHT - 1) // HEIGHT, (width + DEPTH - 1) // DEPTH
    fetch_step = (PANEL + num_tiles - 1) // max(1, num_tiles)
    for d in range(num_depths):
        first, last = width * d // num_depths, width * (d + 1) // num_depths
        fetched, fetched_at = panels, (p * width + last) * PANEL
        if d + 1 == num_depths:
            fetched, fetched_at = ahead_PKL.reshape(-1), ahead_p * ahead_PKL.shape[1] * PANEL
        for tile in range(num_tiles):
            # Tiles of about the same height: one of a single row is half as fast.
            low, high = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            panel_at = (p * width + first) * PANEL
            add_tile(  # type: ignore[call-arg]
                rows, low * width + first, width,
                panels, panel_at, PANEL, last - first,
                out, at + low * step, step, high - low,
                fetched, fetched_at + (last - first) * tile // num_tiles * PANEL, fetch_step,
            )  # fmt: skip
