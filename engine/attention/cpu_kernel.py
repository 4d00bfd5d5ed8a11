"""The decode attention of the CPU backend, compiled by numba at its first call: it reads the cache where it lies.

A gather copies every key and value of a step before they are read; here they are read once, and a chunk is still in the
processor's cache when the last of the query heads that share it needs it. Weights are summed chunk by chunk, rescaled
whenever a higher score turns up (online softmax, Milakov and Gimelshein 2018).

All arrays are float32 and contiguous. Shapes: R rows of one token each, H kv heads, G query heads that share one, N
chunks of the cache, S chunks that a row sees at most, C tokens a chunk, D width of a key or value, T tokens of a step.
"""

import numpy as np
from numba import prange

from engine.jit import compiled, exponential, use_threads

__all__ = ["decode_rows", "prepare", "store_rows", "use_threads"]

HIDDEN = np.float32(-1e30)
MAX_PARTS = 64
"""Into so many parts the work is cut; rows differ in length, so there are more parts than threads."""


def prepare() -> None:
    """Compiles the kernel, or loads what was compiled before."""
    row_RHGD, cache_HNCD = (np.zeros((1, 1, 1, 1), np.float32) for _ in range(2))
    one_R = np.ones(1, np.int64)
    rules = (np.float32(1), np.float32(0), 1)
    decode_rows(row_RHGD, (cache_HNCD,) * 2, one_R[None] - 1, (one_R - 1, one_R), row_RHGD[0, 0], rules, row_RHGD)
    store_rows(row_RHGD[0], one_R - 1, cache_HNCD)


@compiled(nogil=True, parallel=True)
def decode_rows(
    query_RHGD: np.ndarray,
    cache_HNCD: tuple[np.ndarray, np.ndarray],
    chunk_ids_RS: np.ndarray,
    span_R: tuple[np.ndarray, np.ndarray],
    sinks_HG: np.ndarray,
    rules: tuple[np.float32, np.float32, int],
    out_RHGD: np.ndarray,
) -> None:
    """Writes the attention of each row over its keys.

    cache_HNCD: keys and values. span_R: the position of the first key of a row's chunks, and its number of keys, those
    before that position included. sinks_HG: a logit that takes weight and gives no value; HIDDEN or less is none.
    rules: scale, soft cap of the scores (0 is none), and how many keys a row sees.
    """
    keys_HNCD, values_HNCD = cache_HNCD
    first_R, length_R = span_R
    scale, softcap, window = rules
    num_heads, num_groups, width = query_RHGD.shape[1:]
    chunk, value_width = values_HNCD.shape[2:]
    num_items = len(query_RHGD) * num_heads
    num_parts = min(num_items, MAX_PARTS)
    for part in prange(num_parts):
        query_GD = np.empty((num_groups, width), np.float32)
        weight_GC = np.empty((num_groups, chunk), np.float32)
        sum_GD = np.empty((num_groups, value_width), np.float32)
        most_G = np.empty(num_groups, np.float32)
        total_G = np.empty(num_groups, np.float32)
        for item in range(part, num_items, num_parts):
            row, head = item // num_heads, item % num_heads
            query_GD[:] = query_RHGD[row, head] * scale
            sum_GD[:] = np.float32(0)
            for g in range(num_groups):
                # A sink is a key seen before all others.
                most_G[g] = max(sinks_HG[head, g], HIDDEN)
                total_G[g] = np.float32(sinks_HG[head, g] > HIDDEN)
            length, base = length_R[row], first_R[row]
            for s in range((length - base + chunk - 1) // chunk):
                low, high = max(0, length - window - base), min(chunk, length - base)
                base += chunk
                _score(query_GD, keys_HNCD[head, chunk_ids_RS[row, s]], low, high, weight_GC)
                if softcap > 0:
                    _soften(weight_GC, low, high, softcap)
                _rescale(weight_GC, low, high, most_G, total_G, sum_GD)
                _add(weight_GC, values_HNCD[head, chunk_ids_RS[row, s]], low, high, sum_GD)
            for g in range(num_groups):
                out_RHGD[row, head, g] = sum_GD[g] * (np.float32(1) / total_G[g])


@compiled(nogil=True, parallel=True)
def store_rows(rows_THD: np.ndarray, slots_T: np.ndarray, cache_HNCD: np.ndarray) -> None:
    """Writes one key or value for each token and head; slot = chunk * C + offset in the chunk."""
    num_heads, _, chunk, width = cache_HNCD.shape
    for t in prange(len(rows_THD)):
        n, c = slots_T[t] // chunk, slots_T[t] % chunk
        for h in range(num_heads):
            for d in range(width):
                cache_HNCD[h, n, c, d] = rows_THD[t, h, d]


@compiled()
def _score(query_GD: np.ndarray, key_CD: np.ndarray, low: int, high: int, weight_GC: np.ndarray) -> None:
    for c in range(low, high):
        for g in range(query_GD.shape[0]):
            dot = np.float32(0)
            for d in range(query_GD.shape[1]):
                dot += query_GD[g, d] * key_CD[c, d]
            weight_GC[g, c] = dot


@compiled()
def _soften(weight_GC: np.ndarray, low: int, high: int, softcap: np.float32) -> None:
    for g in range(weight_GC.shape[0]):
        for c in range(low, high):
            weight_GC[g, c] = softcap * np.tanh(weight_GC[g, c] / softcap)


@compiled()
def _rescale(
    weight_GC: np.ndarray, low: int, high: int, most_G: np.ndarray, total_G: np.ndarray, sum_GD: np.ndarray
) -> None:
    """From scores to weights, relative to the highest score so far."""
    for g in range(weight_GC.shape[0]):
        most = most_G[g]
        for c in range(low, high):
            most = max(most, weight_GC[g, c])
        total = np.float32(0)
        for c in range(low, high):
            weight = exponential(weight_GC[g, c] - most)
            weight_GC[g, c] = weight
            total += weight
        shrink = exponential(most_G[g] - most)
        most_G[g] = most
        total_G[g] = total_G[g] * shrink + total
        for d in range(sum_GD.shape[1]):
            sum_GD[g, d] *= shrink


@compiled()
def _add(weight_GC: np.ndarray, value_CD: np.ndarray, low: int, high: int, sum_GD: np.ndarray) -> None:
    # Four keys at a time, or most of the work would be loading and storing the sums.
    single = low + (high - low) // 4 * 4
    for c in range(low, single, 4):
        for g in range(sum_GD.shape[0]):
            w0, w1, w2, w3 = weight_GC[g, c], weight_GC[g, c + 1], weight_GC[g, c + 2], weight_GC[g, c + 3]
            for d in range(sum_GD.shape[1]):
                pair = w0 * value_CD[c, d] + w1 * value_CD[c + 1, d]
                sum_GD[g, d] += pair + w2 * value_CD[c + 2, d] + w3 * value_CD[c + 3, d]
    for c in range(single, high):
        for g in range(sum_GD.shape[0]):
            for d in range(sum_GD.shape[1]):
                sum_GD[g, d] += weight_GC[g, c] * value_CD[c, d]
