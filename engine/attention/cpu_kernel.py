"""The attention of the CPU backend, compiled by numba at its first call: it reads the cache where it lies.

A gather copies every key and value of a step before they are read; here they are read once, and a chunk is still in the
processor's cache when the last of the queries that share it needs it. Weights are summed chunk by chunk, rescaled
whenever a higher score turns up (online softmax, Milakov and Gimelshein 2018).

All arrays are float32 and contiguous. Shapes: T tokens of a step, A query heads, H kv heads, N chunks of the cache, C
tokens a chunk, D width of a key, V of a value; J spans, M rows of a span: its tokens times the heads that share a key.
Flat arrays have no suffix; what begins in them at `at` is named so.
"""

import numpy as np
from numba import prange

from engine.attention.lane_weights import HIDDEN, weigh_row
from engine.jit import compiled, exponential, use_threads
from engine.lane_sums import dot_rows, fetch, turn_rows
from engine.matrix_tiles import HEIGHT, LANES, PANEL, add_tile

__all__ = ["MAX_SPAN", "attend_spans", "prepare", "store_rows", "use_threads"]

NOTHING = np.float32(HIDDEN)
MAX_SPAN = 16
"""Tokens of a span at most: they compute with the last chunks whole, and 3 heads each are 4 tiles of 12 rows."""
MIN_TURNED_ROWS = 8
"""For fewer rows turning the keys costs more than it saves."""


def prepare() -> None:
    """Compiles the kernel, or loads what was compiled before."""
    row_TAD, cache_HNCD = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
    zero_J, one_J = np.zeros(1, np.int64), np.ones(1, np.int64)
    rules = (np.float32(1), np.float32(0), 1)
    spans = (zero_J, one_J, zero_J, zero_J, zero_J)
    attend_spans(row_TAD, (cache_HNCD,) * 2, spans, zero_J, row_TAD[0, 0], rules, row_TAD, 1)
    store_rows(row_TAD, row_TAD, zero_J, (cache_HNCD,) * 2)


@compiled(nogil=True, parallel=True)
def attend_spans(
    query_TAD: np.ndarray,
    cache_HNCD: tuple[np.ndarray, np.ndarray],
    spans: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    chunk_ids: np.ndarray,
    sinks_A: np.ndarray,
    rules: tuple[np.float32, np.float32, int],
    out_TAV: np.ndarray,
    num_threads: int,
) -> None:
    """Writes the attention of consecutive tokens of a request over its keys, those of the tokens included.

    cache_HNCD: keys and values. spans: the first token of each in T, their number, the position of the first, that of
    the first key of its chunks, and where in `chunk_ids` those begin. sinks_A: a logit that takes weight and gives no
    value; HIDDEN or less is none. rules: scale, soft cap of the scores (0 is none), and how many keys a token sees.
    """
    keys_HNCD, values_HNCD = cache_HNCD
    start_J, count_J, position_J, first_J, ids_J = spans
    scale, softcap, window = rules
    num_heads, num_chunks, chunk, width = keys_HNCD.shape
    value_width, num_groups = values_HNCD.shape[3], query_TAD.shape[1] // num_heads
    keys, values = keys_HNCD.reshape(-1), values_HNCD.reshape(-1)
    num_items = len(start_J) * num_heads
    num_parts = min(num_items, num_threads)
    for part in prange(num_parts):
        num_rows = MAX_SPAN * num_groups
        query, sums = np.empty(num_rows * width, np.float32), np.empty(num_rows * value_width, np.float32)
        weights = np.empty(num_rows * chunk, np.float32)
        turned = np.empty(width * PANEL, np.float32)
        most_M, total_M = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
        # In turn: spans that stand together are of about the same length.
        for item in range(part, num_items, num_parts):
            j, head = item // num_heads, item % num_heads
            position, first, num_rows = position_J[j], first_J[j], count_J[j] * num_groups
            _take(query_TAD, (start_J[j], head, num_groups, num_rows), scale, query)
            _begin(sinks_A[head * num_groups : (head + 1) * num_groups], num_rows, most_M, total_M)
            sums[: num_rows * value_width] = np.float32(0)
            end = position + count_J[j]
            num_seen = (end - first + chunk - 1) // chunk
            # What is read next after a span is the beginning of this thread's next one.
            next_j, next_head = min(item + num_parts, num_items - 1) // num_heads, (item + num_parts) % num_heads
            next_s = max(0, position_J[next_j] + 1 - window - first_J[next_j]) // chunk
            next_corner = (next_head * num_chunks + chunk_ids[ids_J[next_j] + next_s]) * chunk
            for s in range(max(0, position + 1 - window - first) // chunk, num_seen):
                corner = (head * num_chunks + chunk_ids[ids_J[j] + s]) * chunk
                further = next_corner
                if s + 1 < num_seen:
                    further = (head * num_chunks + chunk_ids[ids_J[j] + s + 1]) * chunk
                # Keys are counted within the chunk: the first token sees those before `seen`.
                seen = position + 1 - first - s * chunk
                low, high = max(0, seen - window), min(chunk, end - first - s * chunk)
                part_of_keys = (corner * width, width, low, high, chunk)
                _score(query, num_rows, keys, part_of_keys, further * width, turned, weights)
                if softcap > 0:
                    _soften(weights, num_rows, (low, high, chunk), softcap)
                span = (seen, window, num_groups, num_rows, chunk)
                _weigh(weights, span, (most_M, total_M), sums, value_width)
                part_of_values = (corner * value_width, value_width, low, high, chunk)
                _add(weights, num_rows, values, part_of_values, further * value_width, sums)
            _give(sums, total_M, (start_J[j], head, num_groups, num_rows), out_TAV)


@compiled(nogil=True, parallel=True)
def store_rows(
    keys_THD: np.ndarray, values_THV: np.ndarray, slots_T: np.ndarray, cache_HNCD: tuple[np.ndarray, np.ndarray]
) -> None:
    """Writes a key and a value for each token and head; slot = chunk * C + offset in the chunk."""
    keys_HNCD, values_HNCD = cache_HNCD
    num_heads, _, chunk, width = keys_HNCD.shape
    for t in prange(len(slots_T)):
        n, c = slots_T[t] // chunk, slots_T[t] % chunk
        for h in range(num_heads):
            for d in range(width):
                keys_HNCD[h, n, c, d] = keys_THD[t, h, d]
            for v in range(values_HNCD.shape[3]):
                values_HNCD[h, n, c, v] = values_THV[t, h, v]


@compiled()
def _take(query_TAD: np.ndarray, rows: tuple[int, int, int, int], scale: np.float32, query: np.ndarray) -> None:
    """Copies the queries of a span, scaled; rows: first token, kv head, heads that share it, number of rows."""
    start, head, num_groups, num_rows = rows
    width = query_TAD.shape[2]
    for m in range(num_rows):
        t, a = start + m // num_groups, head * num_groups + m % num_groups
        for d in range(width):
            query[m * width + d] = query_TAD[t, a, d] * scale


@compiled()
def _begin(sinks: np.ndarray, num_rows: int, most_M: np.ndarray, total_M: np.ndarray) -> None:
    for m in range(num_rows):
        # A sink is a key seen before all others.
        sink = sinks[m % len(sinks)]
        most_M[m] = max(sink, NOTHING)
        total_M[m] = np.float32(sink > NOTHING)


@compiled()
def _give(sums: np.ndarray, total_M: np.ndarray, rows: tuple[int, int, int, int], out_TAV: np.ndarray) -> None:
    start, head, num_groups, num_rows = rows
    width = out_TAV.shape[2]
    for m in range(num_rows):
        t, a = start + m // num_groups, head * num_groups + m % num_groups
        share = np.float32(1) / total_M[m]
        for v in range(width):
            out_TAV[t, a, v] = sums[m * width + v] * share


@compiled()
def _score(
    query: np.ndarray,
    num_rows: int,
    keys: np.ndarray,
    part: tuple[int, int, int, int, int],
    further: int,
    turned: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Writes the scores of all rows for the keys from `low` to `high` of a chunk; others of it get any value.

    further: where the chunk begins that is read next. It is fetched bit by bit: a burst fills the processor's few line
    buffers, and everything else waits.
    """
    at, width, low, high, chunk = part
    done = width // LANES * LANES if chunk % LANES == 0 else 0
    if done == width and chunk % PANEL == 0 and num_rows >= MIN_TURNED_ROWS:
        _score_turned(query, num_rows, keys, part, further, turned, scores)
        return
    bit = chunk * width // (num_rows * max(1, chunk // LANES)) // LANES * LANES
    for m in range(num_rows):
        if done > 0:
            for c in range(low // LANES * LANES, high, LANES):
                if bit > 0:
                    fetch(keys, further + (m * (chunk // LANES) + c // LANES) * bit, bit)  # type: ignore[call-arg]
                dot_rows(query, m * width, keys, at + c * width, width, done, scores, m * chunk + c)  # type: ignore[call-arg]
        if done < width:
            for c in range(low, high):
                dot = scores[m * chunk + c] if done > 0 else np.float32(0)
                for d in range(done, width):
                    dot += query[m * width + d] * keys[at + c * width + d]
                scores[m * chunk + c] = dot


@compiled()
def _score_turned(
    query: np.ndarray,
    num_rows: int,
    keys: np.ndarray,
    part: tuple[int, int, int, int, int],
    further: int,
    turned: np.ndarray,
    scores: np.ndarray,
) -> None:
    at, width, low, high, chunk = part
    num_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    scores[: num_rows * chunk] = np.float32(0)
    for c in range(low // PANEL * PANEL, high, PANEL):
        for lanes in range(0, PANEL, LANES):
            turn_rows(keys, at + (c + lanes) * width, width, width, turned, lanes)  # type: ignore[call-arg]
        for tile in range(num_tiles):
            row, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            add_tile(  # type: ignore[call-arg]
                query,
                row * width,
                width,
                turned,
                0,
                PANEL,
                width,
                scores,
                row * chunk + c,
                chunk,
                end - row,
                keys,
                further + c * width if tile == 0 else at,
                PANEL if tile == 0 else 0,
            )


@compiled()
def _soften(scores: np.ndarray, num_rows: int, seen: tuple[int, int, int], softcap: np.float32) -> None:
    low, high, chunk = seen
    for m in range(num_rows):
        for c in range(low, high):
            scores[m * chunk + c] = softcap * np.tanh(scores[m * chunk + c] / softcap)


@compiled()
def _weigh(
    weights: np.ndarray,
    span: tuple[int, int, int, int, int],
    state_M: tuple[np.ndarray, np.ndarray],
    sums: np.ndarray,
    width: int,
) -> None:
    """From scores to weights, relative to the highest score so far, and the sums so far to the same."""
    seen, window, num_groups, num_rows, chunk = span
    most_M, total_M = state_M
    for m in range(num_rows):
        own = seen + m // num_groups
        low, high = max(0, own - window), min(chunk, own)
        if chunk % LANES == 0:
            most, total = weigh_row(weights, m * chunk, low, high, chunk, most_M[m])  # type: ignore[call-arg, var-annotated]
        else:
            most, total = _weigh_plainly(weights, m * chunk, (low, high, chunk), most_M[m])
        shrink = exponential(most_M[m] - most)
        most_M[m] = most
        total_M[m] = total_M[m] * shrink + total
        for v in range(width):
            sums[m * width + v] *= shrink


@compiled()
def _weigh_plainly(
    weights: np.ndarray, at: int, seen: tuple[int, int, int], most: np.float32
) -> tuple[np.float32, np.float32]:
    low, high, chunk = seen
    total = np.float32(0)
    for c in range(low, high):
        most = max(most, weights[at + c])
    for c in range(chunk):
        weight = np.float32(0)
        if low <= c < high:
            weight = exponential(weights[at + c] - most)
        weights[at + c] = weight
        total += weight
    return most, total


@compiled()
def _add(
    weights: np.ndarray,
    num_rows: int,
    values: np.ndarray,
    part: tuple[int, int, int, int, int],
    further: int,
    sums: np.ndarray,
) -> None:
    """Adds the values of the keys from `low` to `high` of a chunk, by weight, to the sums of all rows."""
    at, width, low, high, chunk = part
    tiled = width // PANEL * PANEL
    num_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    for tile in range(num_tiles):
        row, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        for v in range(0, tiled, PANEL):
            add_tile(  # type: ignore[call-arg]
                weights, row * chunk + low, chunk,
                values, at + low * width + v, width,
                high - low,
                sums, row * width + v, width,
                end - row,
                values, further + v * chunk if tile == 0 else at, PANEL if tile == 0 else 0,
            )  # fmt: skip
    if tiled < width:
        for m in range(num_rows):
            for c in range(low, high):
                for v in range(tiled, width):
                    sums[m * width + v] += weights[m * chunk + c] * values[at + c * width + v]
