"""The tokens of one request as a tensor that grows with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

_GROWTH = 1.5
_SPARE = 64
"""Tokens; a short output never outgrows its first tensor."""


class TokenHistory:
    """Appends in place, so that a token costs the same however many there are; it is copied each time it has grown by
    half. What `extended_to` gives is a view, valid until its next call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids_1C = torch.empty(1, 0, dtype=torch.long, device=device)
        self._length = 0

    def extended_to(self, token_ids: Sequence[int], length: int) -> Tensor:
        """Gives the first `length` of `token_ids`, which begin with those of the call before, as 1 x T."""
        if length > self._ids_1C.shape[1]:
            grown_1C = self._ids_1C.new_empty(1, int(length * _GROWTH) + _SPARE)
            grown_1C[:, : self._length] = self._ids_1C[:, : self._length]
            self._ids_1C = grown_1C
        new_ids = token_ids[self._length : length]
        self._ids_1C[0, self._length : length] = torch.tensor(new_ids, dtype=torch.long, device=self._device)
        self._length = length
        return self._ids_1C[:, :length]
