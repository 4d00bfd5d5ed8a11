"""The reference backend, for any device: gathers whole chunks, then torch's scaled dot product attention.

Shapes as in `step`; H kv heads, T tokens of the step, D width. Kv heads lead, so that the query heads that share one
become further queries of it and keys are never repeated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.step import LayerView


@dataclass(frozen=True, slots=True)
class LayerRules:
    """How one layer weighs its keys. sinks: one logit per query head that takes weight and gives no value."""

    layer: int
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(
    view: LayerView,
    query_HGTD: Tensor,
    key_HTD: Tensor,
    value_HTD: Tensor,
    rules: LayerRules,
) -> Tensor:
    """Stores the new keys and values and gives the attention output as T x (H * G) x D."""
    view.cache.write(rules.layer, key_HTD, value_HTD, view.slots_T)
    out_THGD = room_for_output(query_HGTD, value_HTD)
    for index, group in enumerate(view.groups):
        query_HRGD = query_HGTD[:, :, group.start : group.end].transpose(1, 2)
        out_HRGD = _attend_group(view, index, query_HRGD, rules)
        out_THGD[group.start : group.end] = out_HRGD.transpose(0, 1)
    attend_prompts(view, query_HGTD, (key_HTD, value_HTD), rules, out_THGD)
    return out_THGD.flatten(1, 2)


def room_for_output(query_HGTD: Tensor, value_HTD: Tensor) -> Tensor:
    """Gives T x H x G x D, not filled."""
    num_heads, num_groups, num_tokens, _ = query_HGTD.shape
    return query_HGTD.new_empty(num_tokens, num_heads, num_groups, value_HTD.shape[-1])


def attend_prompts(
    view: LayerView, query_HGTD: Tensor, new_HTD: tuple[Tensor, Tensor], rules: LayerRules, out_THGD: Tensor
) -> None:
    """Writes the attention of the prompt chunks; new_HTD are the keys and values of the step, stored already."""
    num_heads, num_groups = query_HGTD.shape[:2]
    sinks = None if rules.sinks is None else rules.sinks.view(num_heads, num_groups, 1, 1)
    for index, chunk in enumerate(view.chunks):
        rows = slice(chunk.start, chunk.end)
        if chunk.chunk_ids is None:
            seen_key_HSD, seen_value_HSD = (new[:, rows] for new in new_HTD)
        else:
            read_HTD = view.cache.read(rules.layer, chunk.chunk_ids)
            seen_key_HSD, seen_value_HSD = (read[:, : chunk.num_keys] for read in read_HTD)
        seen = (_share_heads(seen_key_HSD, num_groups), _share_heads(seen_value_HSD, num_groups))
        mask_QS = None
        if rules.softcap is not None or sinks is not None or not view.is_plain(index):
            mask_QS = view.chunk_mask(index, dtype=query_HGTD.dtype)
        out_HGQD = _weigh(query_HGTD[:, :, rows], seen, mask_QS, rules, sinks)
        out_THGD[rows] = out_HGQD.permute(2, 0, 1, 3)


def _attend_group(view: LayerView, index: int, query_HRGD: Tensor, rules: LayerRules) -> Tensor:
    num_heads, num_rows, num_groups, _ = query_HRGD.shape
    keys_HTD, values_HTD = view.cache.read(rules.layer, view.groups[index].chunk_ids)
    key_HRSD = keys_HTD.view(num_heads, num_rows, -1, keys_HTD.shape[-1])
    value_HRSD = values_HTD.view(num_heads, num_rows, -1, values_HTD.shape[-1])
    mask = view.group_mask(index, num_groups=num_groups, num_keys=key_HRSD.shape[2], dtype=query_HRGD.dtype)
    sinks = None if rules.sinks is None else rules.sinks.view(num_heads, 1, num_groups, 1)
    return _weigh(query_HRGD, (key_HRSD, value_HRSD), mask, rules, sinks)


def _share_heads(seen_HSD: Tensor, num_groups: int) -> Tensor:
    return seen_HSD[:, None].expand(-1, num_groups, -1, -1)


def _weigh(
    query: Tensor,
    key_and_value: tuple[Tensor, Tensor],
    mask: Tensor | None,
    rules: LayerRules,
    sinks: Tensor | None,
) -> Tensor:
    """Where mask is None there are as many queries as keys, and none looks ahead."""
    key, value = key_and_value
    if mask is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=rules.scale)
    if rules.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rules.scale)
    scores = torch.matmul(query, key.transpose(-1, -2)) * rules.scale
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., : key.shape[-2]], value)
