"""Swaps that were not committed: counted by what failed, and the last of them kept for who looks at the fleet."""

from collections import deque

from engine import PitstopError, WeightsInvalid, WeightsSourceError
from serve_app.messages import RollbackRequest, SwapFailure, SwapRequest
from serve_app.metrics import Recorder
from serve_app.protocol.errors import ManifestError, RollingFailed, VersionUnavailable
from serve_app.weights.history import now

REASONS = ("source", "invalid", "manifest", "rolling", "other")
MAX_KEPT = 8
"""As many as a person reads; the log has all."""


class SwapFailures:
    """Kept while the controller runs. One event loop only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kept: deque[SwapFailure] = deque(maxlen=MAX_KEPT)
        # From zero, so that the first one is a rise.
        for reason in REASONS:
            recorder.count("pitstop_swap_failures_total", reason, amount=0)

    def add(self, request: SwapRequest | RollbackRequest, error: PitstopError, *, was_rolled_back: bool) -> None:
        """Counts and keeps one. was_rolled_back: replicas had its weights for a while."""
        reason = _reason_of(error)
        self._recorder.count("pitstop_swaps_total", "rolled_back" if was_rolled_back else "refused")
        self._recorder.count("pitstop_swap_failures_total", reason)
        label = request.label if isinstance(request, SwapRequest) else ""
        self._kept.appendleft(SwapFailure(now(), reason, str(error), label, request.requested_by, was_rolled_back))

    def listed(self) -> list[SwapFailure]:
        """Gives the last ones, newest first."""
        return list(self._kept)


def _reason_of(error: PitstopError) -> str:
    kinds: tuple[tuple[type[PitstopError], str], ...] = (
        (WeightsSourceError, "source"),
        (VersionUnavailable, "source"),
        (WeightsInvalid, "invalid"),
        (ManifestError, "manifest"),
        (RollingFailed, "rolling"),
    )
    cause = error.__cause__
    return next((reason for kind, reason in kinds if isinstance(error, kind) or isinstance(cause, kind)), "other")
