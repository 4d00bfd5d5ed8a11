"""What flash-attn's two kernels compute, written out row by row for any device; their signatures, no speed."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.attention.flash import FlashKernels


def varlen(
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
) -> Tensor:
    for index in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert index.dtype == torch.int32, "the kernels read int32"
        assert index.is_contiguous()
    assert causal
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    out = torch.full_like(q, float("nan"))  # the kernels leave what no row covers as they found it
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row, blocks in enumerate(block_table):
        rows_q, num_keys = slice(ends_q[row], ends_q[row + 1]), ends_k[row + 1] - ends_k[row]
        assert rows_q.stop - rows_q.start <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        assert num_keys <= len(blocks) * k.shape[1]
        out[rows_q] = _attend(q[rows_q], k, v, blocks, num_keys, softmax_scale, window_size, softcap)
    return out


def decode(
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
) -> Tensor:
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert causal
    assert q.shape[1] == 1
    assert len(q) == len(cache_seqlens) == len(block_table)
    rows = [
        _attend(q[row], k_cache, v_cache, block_table[row], num_keys, softmax_scale, window_size, softcap)
        for row, num_keys in enumerate(cache_seqlens.tolist())
    ]
    return torch.stack(rows)


def _attend(
    q_QAD: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    num_keys: int,
    scale: float,
    window: tuple[int, int],
    cap: float,
) -> Tensor:
    assert k.is_contiguous()
    assert v.is_contiguous()
    seen = blocks[: -(-num_keys // k.shape[1])].long()
    num_groups = q_QAD.shape[1] // k.shape[2]
    key_SAD, value_SAD = (
        store[seen].flatten(0, 1)[:num_keys].repeat_interleave(num_groups, dim=1).float() for store in (k, v)
    )
    scores_AQS = torch.einsum("qad,sad->aqs", q_QAD.float(), key_SAD) * scale
    if cap:
        scores_AQS = cap * torch.tanh(scores_AQS / cap)
    position_Q1 = torch.arange(len(q_QAD), device=q_QAD.device)[:, None] + num_keys - len(q_QAD)
    position_S = torch.arange(num_keys, device=q_QAD.device)
    visible_QS = position_S <= position_Q1
    if window != (-1, -1):
        assert window[1] == 0
        visible_QS &= position_S >= position_Q1 - window[0]
    weights_AQS = torch.softmax(scores_AQS.masked_fill(~visible_QS, float("-inf")), dim=-1)
    # A query that sees nothing gets zeros from the kernels.
    weights_AQS = torch.where(visible_QS.any(dim=-1)[None, :, None], weights_AQS, 0.0)
    return torch.einsum("aqs,sad->qad", weights_AQS, value_SAD).to(q_QAD.dtype)


@dataclass(slots=True)
class Calls:
    """Rows of each call of a kernel."""

    varlen: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)


KERNELS = FlashKernels(varlen=varlen, decode=decode, dtypes=(torch.float32, torch.bfloat16), page_multiple=4)
"""Take what the CPU and small pages have to offer."""


def counting(calls: Calls) -> FlashKernels:
    """Gives the kernels, noting in `calls` how they are used."""

    def counted_varlen(*arguments: Tensor | int, **keywords: object) -> Tensor:
        calls.varlen.append(len(arguments[3]) - 1)  # type: ignore[arg-type]
        return varlen(*arguments, **keywords)  # type: ignore[arg-type]

    def counted_decode(*arguments: Tensor, **keywords: object) -> Tensor:
        calls.decode.append(len(arguments[0]))
        return decode(*arguments, **keywords)  # type: ignore[arg-type]

    return replace(KERNELS, varlen=counted_varlen, decode=counted_decode)
