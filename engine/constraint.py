"""What may come next in the output of one request, as a grammar compiled above the engine says it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class TokenConstraint(Protocol):
    """The state of one output. Each output has its own, which goes with it through preemption.

    One thread at a time uses it, not always the same. What it raises ends its own request FAILED and no other.
    """

    def fill_mask(self, mask: memoryview) -> None:
        """Writes which tokens may come next: bit i % 8 of byte i // 8 is 1 where token i may.

        mask: zeros, of whole 32-bit words that hold a bit for each token of the model; bits beyond these do not count.
        Called once a token, beside the forward pass that gives the scores.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that were chosen, each once and in order; the one that ends the output too."""
        ...

    @property
    def is_finished(self) -> bool:
        """True once nothing may follow: the last token then ends the output, with the reason STOP."""
        ...

    def fork(self) -> "TokenConstraint":
        """Gives a copy with a state of its own, for another output of the same prompt."""
        ...
