"""The backend of the CPU: single-token rows read the cache where it lies, prompt chunks go torch's way."""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.sdpa import LayerRules, attend_prompts, room_for_output
from engine.attention.step import DecodeGroup, LayerView

SEES_ALL = 1 << 40
"""A window that no sequence outgrows."""


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """Attention of single-token rows without a gather and without masks. One thread at a time."""

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
        self._store(view, key_HTD, value_HTD, rules)
        out_THGD = room_for_output(query_HGTD, value_HTD)
        for group in view.groups:
            self._attend_rows(view, group, query_HGTD[:, :, group.start : group.end], rules, out_THGD)
        attend_prompts(view, query_HGTD, (key_HTD, value_HTD), rules, out_THGD)
        return out_THGD.flatten(1, 2)

    def _store(self, view: LayerView, key_HTD: Tensor, value_HTD: Tensor, rules: LayerRules) -> None:
        for new_HTD, cache_HNCD in zip((key_HTD, value_HTD), view.cache.chunks(rules.layer), strict=True):
            rows_THD = new_HTD.transpose(0, 1).contiguous()
            self._compiled.store_rows(rows_THD.numpy(), view.slots_T.numpy(), cache_HNCD.numpy())

    def _attend_rows(
        self, view: LayerView, group: DecodeGroup, query_HGRD: Tensor, rules: LayerRules, out_THGD: Tensor
    ) -> None:
        keys_HNCD, values_HNCD = view.cache.chunks(rules.layer)
        num_heads, num_groups, num_rows, _ = query_HGRD.shape
        sinks_HG = np.full((num_heads, num_groups), -np.inf, dtype=np.float32)
        if rules.sinks is not None:
            sinks_HG = rules.sinks.float().view(num_heads, num_groups).numpy()
        self._compiled.decode_rows(
            query_HGRD.permute(2, 0, 1, 3).contiguous().numpy(),
            (keys_HNCD.numpy(), values_HNCD.numpy()),
            group.chunk_ids.view(num_rows, -1).numpy(),
            (group.first_R.numpy(), group.lengths_R.numpy()),
            sinks_HG,
            (np.float32(rules.scale), np.float32(rules.softcap or 0), view.window or SEES_ALL),
            out_THGD[group.start : group.end].numpy(),
        )


def find_decode_kernel(dtype: torch.dtype, device: torch.device) -> DecodeKernel | None:
    """Gives the kernel, compiled, where it computes this dtype on this device.

    The first time on a machine takes some seconds.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return None
    return DecodeKernel(load_kernels("engine.attention.cpu_kernel"))


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
