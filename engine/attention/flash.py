"""Flash attention over the paged cache, for CUDA: no gathering, no masks, blocks are read where they lie.

Shapes: R rows that decode, B rows of the packed way, W blocks a row may have, N blocks of the cache, P tokens a block,
T tokens of the step, A query heads, H kv heads (G query heads each), D width. All index tensors are int32.
Keys behind the length of a row are never loaded, so nothing an earlier owner left in a block can show.
"""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.sdpa import LayerRules
from engine.kv_cache import KVCache, LayerShape

MIN_CAPABILITY = (8, 0)
"""flash-attn 2 is written for Ampere and later."""

logger = logging.getLogger(__name__)


class VarlenKernel(Protocol):
    """`flash_attn.flash_attn_varlen_func`: rows of any length, one behind the other."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        block_table: Tensor,
    ) -> Tensor: ...


class DecodeKernel(Protocol):
    """`flash_attn.flash_attn_with_kvcache`: one token a row, whose keys are split over the device."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class FlashKernels:
    """The two kernels and what they take; the limits are those of flash-attn 2."""

    varlen: VarlenKernel
    decode: DecodeKernel
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    page_multiple: int = 256
    max_width: int = 256
    width_multiple: int = 8
    """Of a head; the kernels would copy the whole cache to pad another width."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first R rows of the step, a single token each."""

    lengths_R: Tensor
    table_RW: Tensor


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows behind those: ends_q counts tokens from the first of these rows, ends_k their keys."""

    ends_q_B1: Tensor
    ends_k_B1: Tensor
    table_BW: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class FlashView:
    """One step as the layers of one block group see it. window: tokens that a token sees, itself included."""

    cache: KVCache
    kernels: FlashKernels
    window: int | None
    slots_T: Tensor
    decode: DecodeRows | None
    packed: PackedRows | None


def find_flash(device: torch.device) -> FlashKernels | str:
    """Gives flash-attn's kernels where the device runs them, else why not."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than Ampere"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    try:
        module: Any = importlib.import_module("flash_attn")  # without types
    except ImportError as error:
        return f"flash-attn is installed and cannot be imported: {error}"
    return FlashKernels(varlen=module.flash_attn_varlen_func, decode=module.flash_attn_with_kvcache)


def objection_to_flash(
    kernels: FlashKernels, layers: Sequence[LayerShape], *, dtype: torch.dtype, page_size: int
) -> str | None:
    """Says why these kernels cannot compute this model, or None."""
    widths = {width for layer in layers for width in (layer.key_width, layer.value_width)}
    if dtype not in kernels.dtypes:
        return f"dtype is {dtype}"
    if page_size % kernels.page_multiple:
        return f"page_size is {page_size}, and flash-attn needs a multiple of {kernels.page_multiple}"
    if any(layer.key_width != layer.value_width for layer in layers):
        return "keys and values differ in width"
    if max(widths) > kernels.max_width or any(width % kernels.width_multiple for width in widths):
        return f"heads are {max(widths)} wide; at most {kernels.max_width} in steps of {kernels.width_multiple} go"
    if any(layer.has_sinks for layer in layers):
        return "the model has attention sinks"
    return None


def attend(view: FlashView, query_HGTD: Tensor, key_HTD: Tensor, value_HTD: Tensor, rules: LayerRules) -> Tensor:
    """Stores the new keys and values and gives the attention output as T x (H * G) x D."""
    view.cache.write(rules.layer, key_HTD, value_HTD, view.slots_T)
    keys_NPHD, values_NPHD = view.cache.pages(rules.layer)
    query_TAD = query_HGTD.flatten(0, 1).transpose(0, 1)
    window = (-1, -1) if view.window is None else (view.window - 1, 0)
    num_decoding = 0 if view.decode is None else len(view.decode.lengths_R)
    outputs = []
    if view.decode is not None:
        out_R1AD = view.kernels.decode(
            query_TAD[:num_decoding, None],
            keys_NPHD,
            values_NPHD,
            cache_seqlens=view.decode.lengths_R,
            block_table=view.decode.table_RW,
            softmax_scale=rules.scale,
            causal=True,
            window_size=window,
            softcap=rules.softcap or 0.0,
        )
        outputs.append(out_R1AD[:, 0])
    if view.packed is not None:
        outputs.append(
            view.kernels.varlen(
                query_TAD[num_decoding:],
                keys_NPHD,
                values_NPHD,
                view.packed.ends_q_B1,
                view.packed.ends_k_B1,
                view.packed.max_q,
                view.packed.max_k,
                softmax_scale=rules.scale,
                causal=True,
                window_size=window,
                softcap=rules.softcap or 0.0,
                block_table=view.packed.table_BW,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
