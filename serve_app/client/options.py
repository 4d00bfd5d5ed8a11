"""What `swap`, `swap_weights` and `rollback` take by name: the fields of `SwapOptions` and `SwapRequest`, typed."""

from typing import TypedDict

from serve_app.messages import Probes


class SwapHow(TypedDict, total=False):
    """How weights are brought to the fleet; meanings and defaults as in `SwapOptions`."""

    in_flight: str
    pinned: str
    finish_timeout_s: float | None
    strategy: str
    max_paused: int
    on_failure: str
    verify: bool
    wait_s: float
    idempotency_key: str | None


class SwapKeywords(SwapHow, total=False):
    """And what is said of the weights themselves, as in `SwapRequest`."""

    partial: bool
    cast: bool
    probes: Probes | None
    label: str
