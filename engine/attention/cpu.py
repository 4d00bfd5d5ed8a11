"""The backend of the CPU: reads the cache where it lies, for single-token rows and prompt chunks alike."""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.sdpa import LayerRules
from engine.attention.step import LayerView, PromptChunk, Spans

SEES_ALL = 1 << 40
"""A window that no sequence outgrows."""


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """Attention without a gather and without masks. One thread at a time."""

    _compiled: Any  # the module `cpu_kernel`: numba has no types

    def use_threads(self) -> None:
        """Has compiled functions take as many threads as torch does, in the calling thread."""
        self._compiled.use_threads(torch.get_num_threads())

    def attend(
        self,
        view: LayerView,
        query_HGTD: Tensor,
        key_HTD: Tensor,
        value_HTD: Tensor,
        rules: LayerRules,
    ) -> Tensor:
        """Stores the new keys and values and gives the attention output as T x (H * G) x D."""
        keys_HNCD, values_HNCD = view.cache.chunks(rules.layer)
        cache_HNCD = keys_HNCD.numpy(), values_HNCD.numpy()
        self._store(view, key_HTD, value_HTD, cache_HNCD)
        query_TAD = query_HGTD.permute(2, 0, 1, 3).flatten(1, 2).contiguous()
        num_tokens, num_heads = query_TAD.shape[:2]
        sinks_A = no_sinks(num_heads) if rules.sinks is None else rules.sinks.float().numpy()
        out_TAV = query_TAD.new_empty(num_tokens, num_heads, value_HTD.shape[-1])
        numbers = np.float32(rules.scale), np.float32(rules.softcap or 0), view.window or SEES_ALL
        self._attend(view, query_TAD.numpy(), cache_HNCD, sinks_A, numbers, out_TAV.numpy())
        return out_TAV

    def attend_stored(
        self,
        view: LayerView,
        query_TAD: np.ndarray,
        cache_HNCD: tuple[np.ndarray, np.ndarray],
        scale: float,
        out_TAV: np.ndarray,
    ) -> None:
        """Writes the attention output of tokens whose keys and values are in the cache already."""
        numbers = np.float32(scale), np.float32(0), view.window or SEES_ALL
        self._attend(view, query_TAD, cache_HNCD, no_sinks(query_TAD.shape[1]), numbers, out_TAV)

    def _attend(
        self,
        view: LayerView,
        query_TAD: np.ndarray,
        cache_HNCD: tuple[np.ndarray, np.ndarray],
        sinks_A: np.ndarray,
        numbers: tuple[np.float32, np.float32, int],
        out_TAV: np.ndarray,
    ) -> None:
        if view.spans is None:
            view.spans = cut_spans(view, self._compiled.MAX_SPAN)
        places_J, chunk_ids = view.spans.places_J, view.spans.chunk_ids
        num_threads = torch.get_num_threads()
        self._compiled.attend_spans(query_TAD, cache_HNCD, places_J, chunk_ids, sinks_A, numbers, out_TAV, num_threads)

    def _store(
        self, view: LayerView, key_HTD: Tensor, value_HTD: Tensor, cache_HNCD: tuple[np.ndarray, np.ndarray]
    ) -> None:
        rows_THD = [new_HTD.transpose(0, 1).contiguous().numpy() for new_HTD in (key_HTD, value_HTD)]
        self._compiled.store_rows(*rows_THD, view.slots_T.numpy(), cache_HNCD)


@cache
def no_sinks(num_heads: int) -> np.ndarray:
    """Gives a logit for each head that takes no weight."""
    return np.full(num_heads, -np.inf, dtype=np.float32)


def cut_spans(view: LayerView, max_tokens: int) -> Spans:
    """Cuts a step into spans, and names the chunks of each."""
    places: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    num_ids = 0
    for group in view.groups:
        num_rows = group.end - group.start
        width = len(group.chunk_ids) // num_rows
        lengths_R, first_R = group.lengths_R.numpy(), group.first_R.numpy()
        start_R, ids_R = np.arange(group.start, group.end), num_ids + width * np.arange(num_rows)
        places.append(np.stack([start_R, np.ones_like(start_R), lengths_R - 1, first_R, ids_R]))
        ids.append(group.chunk_ids.numpy())
        num_ids += len(ids[-1])
    for chunk in view.chunks:
        start_R = np.arange(chunk.start, chunk.end, max_tokens)
        count_R = np.minimum(max_tokens, chunk.end - start_R)
        position_R = chunk.context + start_R - chunk.start
        rest = np.full_like(start_R, chunk.first), np.full_like(start_R, num_ids)
        places.append(np.stack([start_R, count_R, position_R, *rest]))
        ids.append(_chunk_ids(view, chunk))
        num_ids += len(ids[-1])
    return Spans(tuple(np.concatenate(places, axis=1)), np.concatenate(ids))


def _chunk_ids(view: LayerView, chunk: PromptChunk) -> np.ndarray:
    if chunk.chunk_ids is not None:
        named: np.ndarray = chunk.chunk_ids.numpy()
        return named
    # The request begins here, so every so many tokens enter another chunk.
    size = view.cache.chunk_tokens
    entered: np.ndarray = view.slots_T[chunk.start : chunk.end : size].numpy() // size
    return entered


def find_cpu_kernel(dtype: torch.dtype, device: torch.device) -> CpuKernel | None:
    """Gives the kernel, compiled, where it computes this dtype on this device.

    The first time on a machine takes some seconds.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return None
    return CpuKernel(load_kernels("engine.attention.cpu_kernel"))


def load_kernels(name: str) -> Any:
    """Gives a module of compiled functions, compiled; only who uses them loads the compiler."""
    num_threads = torch.get_num_threads()
    importlib.import_module("engine.jit").use_threads(num_threads)
    kernels = _prepared(name)
    # Numba starts the threads of the runtime that it shares with torch, and sets their number to that of the cores.
    torch.set_num_threads(num_threads)
    return kernels


@cache
def _prepared(name: str) -> Any:
    kernels = importlib.import_module(name)
    kernels.prepare()
    return kernels
