"""How likely the model finds the tokens of a prompt: log-probabilities of its own scores, a slice of rows at a time.

Shapes: S scored positions of all rows, V vocabulary, K most likely tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.plan import PlannedRow, PromptScores
from engine.sampling.sampler import TopTokens, top_tokens
from engine.transfer import to_device

_SLICE_ROWS = 64
"""Rows that are worked on at once; at 256,000 tokens their scores take 64 MB."""


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """What was found, while it is on the device; `ends` cut the positions into those of each request."""

    request_ids: list[str]
    ends: list[int]
    logprobs_S: Tensor
    tops: list[TopTokens]

    def on_host(self) -> "ScoredPrompts":
        """Gives a copy in the host's memory, which holds the values once the device has come to this point."""
        return replace(
            self,
            logprobs_S=self.logprobs_S.to("cpu", non_blocking=True),
            tops=[top.on_host() for top in self.tops],
        )

    def result(self) -> dict[str, PromptScores]:
        """Gives the values by request id."""
        logprobs = self.logprobs_S.tolist()
        top = {row: found for tops in self.tops for row, found in tops.result().items()}
        starts = [0, *self.ends[:-1]]
        return {
            request_id: PromptScores(logprobs[start:end], [top.get(row, ()) for row in range(start, end)])
            for request_id, start, end in zip(self.request_ids, starts, self.ends, strict=True)
        }


def score_prompts(rows: Sequence[PlannedRow], logits_SV: Tensor) -> ScoredPrompts:
    """Compares the logits of the scored positions of `rows`, in order, with the tokens that follow them."""
    targets = [row.request.prompt_ids[position + 1] for row in rows for position in row.scored]
    counts = [row.request.sampling.prompt_logprobs or 0 for row in rows for _ in row.scored]
    targets_S = to_device(targets, logits_SV.device)
    found, tops = [], []
    for start in range(0, len(targets), _SLICE_ROWS):
        end = min(start + _SLICE_ROWS, len(targets))
        logprobs_RV = logits_SV[start:end].float().log_softmax(dim=-1)
        found.append(logprobs_RV.gather(-1, targets_S[start:end, None])[:, 0])
        if any(counts[start:end]):
            tops.append(top_tokens(logprobs_RV, range(start, end), counts[start:end]))
    ends = list(accumulate(len(row.scored) for row in rows))
    return ScoredPrompts([row.request.request_id for row in rows], ends, torch.cat(found), tops)
