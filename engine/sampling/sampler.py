"""One token for each row of logits, and its log-probability where wanted.

A row's token depends on its logits and its `SamplingRow` alone. It is drawn through the inverse of the cumulative
distribution in the order of the vocabulary, not of the scores: a rounding difference in the logits (another batch,
another replica) then moves the draw by no more than itself, where two nearly equal scores would change places.

Shapes: R rows, V vocabulary, B blocks of the vocabulary, W tokens in a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.counter import uniform
from engine.sampling.warpers import apply_temperature, apply_top_k, apply_top_p

_CHUNK_SIZE_BYTES = 256 * 2**20
"""Bounds the scores worked on at once; without it 1,024 rows of 256,000 tokens would need several GB."""
_BLOCK_WIDTH = 256
"""A cumulative sum is serial; over sums of blocks, then inside one block, it is 10 times as fast as over a row."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to choose one token; ranges as in `SamplingParams`, checked there.

    position: the index of the token in the whole sequence of its request, prompt included.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class SampleResult:
    """tokens: one a row. logprobs: by row, of the processed scores. bad_rows: rows without usable logits, their token is 0."""

    tokens: list[int]
    logprobs: dict[int, float]
    bad_rows: list[int]


def sample(
    logits_RV: Tensor, rows: Sequence[SamplingRow], *, logprob_rows: Sequence[int] = ()
) -> SampleResult:
    """Chooses one token for each row; reads `logits_RV` only, and no generator of torch's.

    A row is bad when it holds NaN or +inf, or nothing but -inf; the others are not touched by it. A bad row has no
    log-probability. Log-probabilities are of the scores after temperature, top-k and top-p; of the raw ones where greedy.
    """
    is_good = torch.isfinite(logits_RV.amax(dim=-1)).tolist() if rows else []
    result = SampleResult(
        tokens=[0] * len(rows),
        logprobs={},
        bad_rows=[row for row, good in enumerate(is_good) if not good],
    )
    wants_logprob = frozenset(logprob_rows)
    greedy = [
        row for row, good in enumerate(is_good) if good and rows[row].temperature == 0
    ]
    drawn = [
        row for row, good in enumerate(is_good) if good and rows[row].temperature != 0
    ]
    if greedy:
        tokens_R = _pick(logits_RV, greedy).argmax(dim=-1)
        _record(result, greedy, tokens_R)
        _record_greedy_logprobs(
            result, logits_RV, [row for row in greedy if row in wants_logprob]
        )
    for chunk in _chunks(drawn, logits_RV.shape[-1]):
        scores_RV = _processed_scores(logits_RV, chunk, [rows[row] for row in chunk])
        tokens_R = _draw(
            scores_RV, [uniform(rows[row].seed, rows[row].position) for row in chunk]
        )
        _record(result, chunk, tokens_R)
        _record_logprobs(
            result,
            scores_RV,
            chunk,
            [i for i, row in enumerate(chunk) if row in wants_logprob],
        )
    return result


def _processed_scores(
    logits_RV: Tensor, chunk: Sequence[int], rows: Sequence[SamplingRow]
) -> Tensor:
    scores_RV = _pick(logits_RV, chunk).to(torch.float32, copy=True)
    vocab_size = scores_RV.shape[-1]
    if any(row.temperature != 1 for row in rows):
        apply_temperature(
            scores_RV, _column(scores_RV, [row.temperature for row in rows])
        )
    if any(0 < row.top_k < vocab_size for row in rows):
        top_k = [row.top_k if row.top_k < vocab_size else 0 for row in rows]
        apply_top_k(scores_RV, torch.tensor(top_k, device=scores_RV.device))
    nucleus = [i for i, row in enumerate(rows) if row.top_p < 1]
    if len(nucleus) == len(rows):
        apply_top_p(scores_RV, _column(scores_RV, [row.top_p for row in rows]))
    elif nucleus:
        part_RV = scores_RV[nucleus]
        apply_top_p(part_RV, _column(scores_RV, [rows[i].top_p for i in nucleus]))
        scores_RV[nucleus] = part_RV
    return scores_RV


def _draw(scores_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Gives the first token whose cumulative probability exceeds the row's uniform number; never one of probability 0."""
    probs_RV = scores_RV.softmax(dim=-1)
    padding = -probs_RV.shape[-1] % _BLOCK_WIDTH
    probs_RBW = torch.nn.functional.pad(probs_RV, (0, padding)).view(
        len(uniforms), -1, _BLOCK_WIDTH
    )
    mass_RB = probs_RBW.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_R1 = _column(scores_RV, uniforms)[:, None] * mass_RB[:, -1:]
    block_R1 = _first_above(mass_RB, target_R1)
    before_R1 = mass_RB.gather(-1, (block_R1 - 1).clamp(min=0)).masked_fill(
        block_R1 == 0, 0.0
    )
    probs_RW = probs_RBW.gather(1, block_R1[..., None].expand(-1, -1, _BLOCK_WIDTH))[
        :, 0
    ]
    token_R1 = _first_above(
        probs_RW.cumsum(dim=-1, dtype=torch.float64), target_R1 - before_R1
    )
    return (block_R1 * _BLOCK_WIDTH + token_R1)[:, 0]


def _first_above(mass_RB: Tensor, target_R1: Tensor) -> Tensor:
    # Rounding may lift the target to the total, above which there is nothing.
    total_R1 = mass_RB[:, -1:]
    below_R1 = torch.minimum(
        target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1))
    )
    return torch.searchsorted(mass_RB, below_R1, right=True)


def _record(result: SampleResult, chunk: Sequence[int], tokens_R: Tensor) -> None:
    for row, token in zip(chunk, tokens_R.tolist(), strict=True):
        result.tokens[row] = token


def _record_greedy_logprobs(
    result: SampleResult, logits_RV: Tensor, wanted: Sequence[int]
) -> None:
    for chunk in _chunks(wanted, logits_RV.shape[-1]):
        _record_logprobs(
            result, _pick(logits_RV, chunk).float(), chunk, range(len(chunk))
        )


def _record_logprobs(
    result: SampleResult, scores_RV: Tensor, chunk: Sequence[int], wanted: Sequence[int]
) -> None:
    """`wanted` counts within `chunk`, whose rows `scores_RV` holds."""
    if not wanted:
        return
    tokens_R1 = torch.tensor(
        [[result.tokens[chunk[i]]] for i in wanted], device=scores_RV.device
    )
    logprobs_R1 = scores_RV[list(wanted)].log_softmax(dim=-1).gather(-1, tokens_R1)
    result.logprobs.update(
        zip((chunk[i] for i in wanted), logprobs_R1[:, 0].tolist(), strict=True)
    )


def _pick(logits_RV: Tensor, chunk: Sequence[int]) -> Tensor:
    return logits_RV if len(chunk) == logits_RV.shape[0] else logits_RV[list(chunk)]


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def _chunks(rows: Sequence[int], vocab_size: int) -> Iterable[Sequence[int]]:
    # Scores, probabilities and their intermediates come to about 16 bytes an entry.
    size = max(1, _CHUNK_SIZE_BYTES // (16 * vocab_size))
    return (rows[start : start + size] for start in range(0, len(rows), size))
