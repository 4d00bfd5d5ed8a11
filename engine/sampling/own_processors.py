"""What acts on the scores and is not in transformers: the two penalties of the OpenAI API, and a list of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


class OutputPenalty(LogitsProcessor):
    """Lowers the score of each token of the output by `presence`, and by `frequency` for each time it is there.

    Source of the formula: the OpenAI API reference, presence_penalty and frequency_penalty.
    """

    def __init__(self, *, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output_1T = input_ids[:, self._prompt_length :]
        present_1T = scores.gather(1, output_1T) - self._presence
        lowered_1V = scores.scatter(1, output_1T, present_1T)
        return lowered_1V.scatter_add(1, output_1T, torch.full_like(present_1T, -self._frequency))


class AllowedTokens(LogitsProcessor):
    """Leaves the scores of these tokens alone and rules out all others."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids_A = torch.tensor(sorted(set(token_ids)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002  # the interface of transformers
        self._ids_A = self._ids_A.to(scores.device)
        kept_1V = torch.full_like(scores, -torch.inf)
        return kept_1V.index_copy_(1, self._ids_A, scores.index_select(1, self._ids_A))
