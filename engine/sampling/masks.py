"""What constraints allow in one step, written in a thread of its own while the model computes the scores.

Shapes: R rows with a constraint, V vocabulary, L rows of scores.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from torch import Tensor

from engine.active_request import ActiveRequest
from engine.constraint import TokenConstraint
from engine.plan import PlannedRow
from engine.transfer import to_device

_WORD_BITS = 32

logger = logging.getLogger(__name__)


class StepMasks:
    """The masks of one step, by request; `errors` tells what became of constraints that failed."""

    def __init__(self, allowed_RV: np.ndarray, row_of: dict[str, int], errors: dict[str, str]) -> None:
        self._allowed_RV = allowed_RV
        self._row_of = row_of
        self.errors = errors

    def apply(self, requests: Sequence[ActiveRequest], scores_LV: Tensor) -> Tensor:
        """Gives a copy of the scores in which what is not allowed is -inf; each request has a constraint."""
        num_tokens = scores_LV.shape[-1]
        allowed_LV = self._allowed_RV[[self._row_of[request.request_id] for request in requests], :num_tokens]
        # A model may have scores for more ids than it can read.
        allowed_LV = np.pad(allowed_LV, ((0, 0), (0, num_tokens - allowed_LV.shape[1])))
        return scores_LV.masked_fill(~to_device(allowed_LV, scores_LV.device, np.bool_), float("-inf"))


_NO_MASKS = StepMasks(np.zeros((0, 0), dtype=np.bool_), {}, {})


class MaskFiller:
    """Starts a step's masks and gives them when they are there. One step at a time."""

    def __init__(self) -> None:
        # One thread, so that of a step that is run again the first attempt has ended before the second begins.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pitstop-masks")
        self._filling: Future[StepMasks] | None = None

    def begin(self, rows: Sequence[PlannedRow], vocab_size: int) -> None:
        """Has the masks filled of the rows that sample; their constraints have been told of all tokens by now."""
        sampling = [row.request for row in rows if row.samples and row.request.constraint is not None]
        self._filling = self._thread.submit(_fill, sampling, vocab_size) if sampling else None

    def take(self) -> StepMasks:
        """Gives the masks of the step that was begun, after waiting for them."""
        filling, self._filling = self._filling, None
        return _NO_MASKS if filling is None else filling.result()


def advance(constraint: TokenConstraint, request: ActiveRequest, token: int) -> tuple[bool, str | None]:
    """Tells a constraint what was chosen; gives whether that ends the output, and what went wrong."""
    try:
        constraint.advance((token,))
        return constraint.is_finished, None
    except Exception as error:  # noqa: BLE001  # it may raise anything, and it is this request's own
        return False, _told(request, error)


def _fill(requests: Sequence[ActiveRequest], vocab_size: int) -> StepMasks:
    num_words = -(-vocab_size // _WORD_BITS)
    words_RW = np.zeros((len(requests), num_words), dtype=np.uint32)
    row_of, errors = {}, {}
    for row, request in enumerate(requests):
        row_of[request.request_id] = row
        assert request.constraint is not None
        try:
            request.constraint.fill_mask(memoryview(words_RW[row]).cast("B"))
        except Exception as error:  # noqa: BLE001  # it may raise anything, and it is this request's own
            errors[request.request_id] = _told(request, error)
    bits_RV = np.unpackbits(words_RW.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return StepMasks(bits_RV.view(np.bool_), row_of, errors)


def _told(request: ActiveRequest, error: Exception) -> str:
    """Logs the failure of a constraint and gives it as the request is told."""
    logger.error("constraint failed request_id=%s", request.request_id, exc_info=error)
    return f"its constraint failed: {type(error).__name__}: {error}"
