"""One token for each row of logits, and its log-probability where wanted, on the device.

A row's token depends on its logits and its `SamplingRow` alone. It is drawn through the inverse of the cumulative
distribution in the order of the vocabulary, not of the scores: a rounding difference in the logits (another batch,
another replica) then moves the draw by no more than itself, where two nearly equal scores would change places.

Shapes: R rows, V vocabulary, B blocks of the vocabulary, W tokens in a block.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from engine.request import TopLogprobs
from engine.sampling.counter import uniform
from engine.sampling.warpers import apply_temperature, apply_top_k, apply_top_p
from engine.transfer import to_device

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
    """tokens: one a row. logprobs, top: by row, of the processed scores. bad_rows: without usable logits; token 0.

    empty_rows: those of them whose logits are all -inf.
    """

    tokens: list[int]
    logprobs: dict[int, float]
    bad_rows: list[int]
    top: dict[int, TopLogprobs] = field(default_factory=dict)
    empty_rows: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The K most likely tokens of some rows, of which row i wants `counts[i]`."""

    rows: list[int]
    counts: list[int]
    ids_RK: Tensor
    logprobs_RK: Tensor

    def on_host(self) -> "TopTokens":
        return replace(
            self,
            ids_RK=self.ids_RK.to("cpu", non_blocking=True),
            logprobs_RK=self.logprobs_RK.to("cpu", non_blocking=True),
        )

    def result(self) -> dict[int, TopLogprobs]:
        """Gives the tokens by row, without those of probability 0."""
        listed = zip(self.rows, self.counts, self.ids_RK.tolist(), self.logprobs_RK.tolist(), strict=True)
        return {
            row: tuple(pair for pair in zip(ids[:count], logprobs[:count], strict=True) if pair[1] > -inf)
            for row, count, ids, logprobs in listed
        }


def top_tokens(logprobs_RV: Tensor, rows: Sequence[int], counts: Sequence[int]) -> TopTokens:
    """Gives the most likely tokens; rows: what the rows of `logprobs_RV` are called."""
    top = logprobs_RV.topk(min(max(counts), logprobs_RV.shape[-1]), dim=-1)
    return TopTokens(list(rows), list(counts), top.indices, top.values)


@dataclass(frozen=True, slots=True)
class Draw:
    """What was drawn, while it is on the device. tokens_R: 0 in a bad row. logprobs_W: of `logprob_rows`, in order.

    most_R: the highest logit of each row, by which a bad row is known.
    """

    tokens_R: Tensor
    most_R: Tensor
    logprob_rows: list[int]
    logprobs_W: Tensor
    tops: list[TopTokens] = field(default_factory=list)

    def on_host(self) -> "Draw":
        """Gives a copy in the host's memory, which holds the values once the device has come to this point."""
        return replace(
            self,
            tokens_R=self.tokens_R.to("cpu", non_blocking=True),
            most_R=self.most_R.to("cpu", non_blocking=True),
            logprobs_W=self.logprobs_W.to("cpu", non_blocking=True),
            tops=[top.on_host() for top in self.tops],
        )

    def result(self) -> SampleResult:
        """Gives the values, after waiting for the device if they are there."""
        most = self.most_R.tolist()
        bad_rows = [row for row, value in enumerate(most) if not isfinite(value)]
        logprobs = dict(zip(self.logprob_rows, self.logprobs_W.tolist(), strict=True))
        return SampleResult(
            tokens=self.tokens_R.tolist(),
            logprobs={row: value for row, value in logprobs.items() if row not in bad_rows},
            bad_rows=bad_rows,
            empty_rows=[row for row in bad_rows if most[row] == -inf],
            top={row: top for tops in self.tops for row, top in tops.result().items()},
        )


def draw(
    logits_RV: Tensor,
    rows: Sequence[SamplingRow],
    *,
    logprob_rows: Sequence[int] = (),
    num_top: Mapping[int, int] | None = None,
) -> Draw:
    """Chooses one token for each row; reads `logits_RV` only, and no generator of torch's.

    num_top: by row, how many of the most likely tokens are wanted too; these rows are among `logprob_rows`.

    A row is bad when it holds NaN or +inf, or nothing but -inf; the others are not touched by it. A bad row has no
    log-probability. These are of the scores after temperature, top-k and top-p; of the raw ones where greedy.
    On a GPU only a temperature below 1 and a top_p wait for the device, to look at one number each.
    """
    parts = _Parts(wanted=frozenset(logprob_rows), num_top=num_top or {})
    greedy = [row for row, parameters in enumerate(rows) if parameters.temperature == 0]
    drawn = [row for row, parameters in enumerate(rows) if parameters.temperature != 0]
    if greedy:
        tokens_R = _pick(logits_RV, greedy).argmax(dim=-1)
        parts.add(greedy, tokens_R)
        parts.add_greedy_logprobs(logits_RV, greedy, tokens_R)
    for chunk in _chunks(drawn, logits_RV.shape[-1]):
        scores_RV = _processed_scores(logits_RV, chunk, [rows[row] for row in chunk])
        tokens_R = _draw(scores_RV, [uniform(rows[row].seed, rows[row].position) for row in chunk])
        parts.add(chunk, tokens_R)
        parts.add_logprobs(scores_RV, chunk, tokens_R)
    return parts.together(logits_RV)


class _Parts:
    """Collects what is drawn part by part and puts it in the order of the rows."""

    def __init__(self, wanted: frozenset[int], num_top: Mapping[int, int]) -> None:
        self._wanted = wanted
        self._num_top = num_top
        self._tops: list[TopTokens] = []
        self._rows: list[int] = []
        self._tokens: list[Tensor] = []
        self._logprob_rows: list[int] = []
        self._logprobs: list[Tensor] = []

    def add(self, chunk: Sequence[int], tokens_R: Tensor) -> None:
        self._rows += chunk
        self._tokens.append(tokens_R)

    def add_greedy_logprobs(self, logits_RV: Tensor, greedy: Sequence[int], tokens_R: Tensor) -> None:
        wanted = [i for i, row in enumerate(greedy) if row in self._wanted]
        for part in _chunks(wanted, logits_RV.shape[-1]):
            rows = [greedy[i] for i in part]
            self.add_logprobs(_pick(logits_RV, rows).float(), rows, _pick(tokens_R, part))

    def add_logprobs(self, scores_RV: Tensor, chunk: Sequence[int], tokens_R: Tensor) -> None:
        wanted = [i for i, row in enumerate(chunk) if row in self._wanted]
        if wanted:
            logprobs_WV = _pick(scores_RV, wanted).log_softmax(dim=-1)
            self._logprobs.append(logprobs_WV.gather(-1, _pick(tokens_R, wanted)[:, None])[:, 0])
            self._logprob_rows += [chunk[i] for i in wanted]
            self._add_tops(logprobs_WV, [chunk[i] for i in wanted])

    def _add_tops(self, logprobs_WV: Tensor, rows: Sequence[int]) -> None:
        places = [i for i, row in enumerate(rows) if self._num_top.get(row)]
        if places:
            named = [rows[i] for i in places]
            self._tops.append(top_tokens(_pick(logprobs_WV, places), named, [self._num_top[row] for row in named]))

    def together(self, logits_RV: Tensor) -> Draw:
        tokens_R = _cat(self._tokens, logits_RV.new_empty(0, dtype=torch.long))
        if len(self._tokens) > 1:
            tokens_R = _pick(tokens_R, np.argsort(self._rows).tolist())
        most_R = logits_RV.amax(dim=-1)
        return Draw(
            tokens_R=tokens_R.masked_fill(~torch.isfinite(most_R), 0),
            most_R=most_R,
            logprob_rows=self._logprob_rows,
            logprobs_W=_cat(self._logprobs, logits_RV.new_empty(0, dtype=torch.float32)),
            tops=self._tops,
        )


def _processed_scores(logits_RV: Tensor, chunk: Sequence[int], rows: Sequence[SamplingRow]) -> Tensor:
    scores_RV = _pick(logits_RV, chunk).to(torch.float32, copy=True)
    vocab_size = scores_RV.shape[-1]
    if any(row.temperature != 1 for row in rows):
        apply_temperature(scores_RV, [row.temperature for row in rows])
    if any(0 < row.top_k < vocab_size for row in rows):
        apply_top_k(scores_RV, [row.top_k if row.top_k < vocab_size else 0 for row in rows])
    nucleus = [i for i, row in enumerate(rows) if row.top_p < 1]
    if len(nucleus) == len(rows):
        apply_top_p(scores_RV, _column(scores_RV, [row.top_p for row in rows]))
    elif nucleus:
        part_RV = _pick(scores_RV, nucleus)
        apply_top_p(part_RV, _column(scores_RV, [rows[i].top_p for i in nucleus]))
        scores_RV.index_copy_(0, to_device(nucleus, scores_RV.device), part_RV)
    return scores_RV


def _draw(scores_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Gives the first token whose cumulative probability exceeds the uniform number; never one of probability 0.

    In a row without usable scores it gives some token of the vocabulary.
    """
    probs_RV = scores_RV.softmax(dim=-1)
    padding = -probs_RV.shape[-1] % _BLOCK_WIDTH
    probs_RBW = torch.nn.functional.pad(probs_RV, (0, padding)).view(len(uniforms), -1, _BLOCK_WIDTH)
    mass_RB = probs_RBW.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_R1 = _column(scores_RV, uniforms)[:, None] * mass_RB[:, -1:]
    block_R1 = _first_above(mass_RB, target_R1)
    before_R1 = mass_RB.gather(-1, (block_R1 - 1).clamp(min=0)).masked_fill(block_R1 == 0, 0.0)
    probs_RW = probs_RBW.gather(1, block_R1[..., None].expand(-1, -1, _BLOCK_WIDTH))[:, 0]
    token_R1 = _first_above(probs_RW.cumsum(dim=-1, dtype=torch.float64), target_R1 - before_R1)
    return (block_R1 * _BLOCK_WIDTH + token_R1)[:, 0].clamp(max=scores_RV.shape[-1] - 1)


def _first_above(mass_RB: Tensor, target_R1: Tensor) -> Tensor:
    # Rounding may lift the target to the total, above which there is nothing.
    total_R1 = mass_RB[:, -1:]
    below_R1 = torch.minimum(target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    # Nothing is above or below NaN.
    return torch.searchsorted(mass_RB, below_R1, right=True).clamp(max=mass_RB.shape[-1] - 1)


def _pick(items_R: Tensor, rows: Sequence[int]) -> Tensor:
    """Gives the rows named, in that order; the tensor itself where these are all, which no caller writes to."""
    if list(rows) == list(range(items_R.shape[0])):
        return items_R
    return items_R.index_select(0, to_device(list(rows), items_R.device))


def _cat(parts: Sequence[Tensor], nothing: Tensor) -> Tensor:
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return to_device(values, like.device, np.float64)


def _chunks(rows: Sequence[int], vocab_size: int) -> Iterable[Sequence[int]]:
    # Scores, probabilities and their intermediates come to about 16 bytes an entry.
    size = max(1, _CHUNK_SIZE_BYTES // (16 * vocab_size))
    return (rows[start : start + size] for start in range(0, len(rows), size))
