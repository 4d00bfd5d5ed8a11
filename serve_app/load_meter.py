"""How much work a replica has, in tokens and in seconds, as routing and autoscaling are told."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from engine import EngineStats
from serve_app.settings import AutoscalingSettings
from serve_app.streams import TokenStream

SPEED_DECAY = 0.99
"""Of the best speed, at every heartbeat: halves in about a minute, so that a machine that slows down is noticed."""
UNCOUNTED_S = 0.05
"""A request younger than a step and this is not in the engine's numbers yet."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens still to compute and the best speeds measured lately (0: none yet)."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class LoadMeter:
    """Remembers the best speeds, because that of a half-empty batch says little about what a replica can do."""

    def __init__(self, settings: AutoscalingSettings) -> None:
        self._settings = settings
        self._best = Load()
        self._reported: tuple[Load, bool, int] | None = None
        self._reported_at = 0.0

    def decay(self) -> None:
        """Lets the best speeds fade; called once a heartbeat."""
        self._best = replace(
            self._best,
            prefill_tokens_per_s=self._best.prefill_tokens_per_s * SPEED_DECAY,
            decode_tokens_per_s=self._best.decode_tokens_per_s * SPEED_DECAY,
        )

    def load(self, stats: EngineStats, streams: Iterable[TokenStream]) -> Load:
        """Gives the present load: the engine's queued prompts, and what the open streams are expected to generate."""
        self._best = Load(
            prefill_tokens_per_s=max(self._best.prefill_tokens_per_s, stats.prefill_tokens_per_s),
            decode_tokens_per_s=max(self._best.decode_tokens_per_s, stats.decode_tokens_per_s),
        )
        counted_before = time.perf_counter() - stats.last_step_s - UNCOUNTED_S
        prefill_tokens, decode_tokens = stats.queued_prefill_tokens, 0
        for stream in streams:
            decode_tokens += stream.remaining_tokens
            if stream.num_tokens == 0 and stream.arrived_at > counted_before:
                prefill_tokens += stream.num_prompt_tokens
        return replace(self._best, prefill_tokens=prefill_tokens, decode_tokens=decode_tokens)

    def work_s(self, load: Load) -> float:
        """Gives the seconds this replica needs for its load; assumed speeds stand in for unmeasured ones."""
        prefill_speed = load.prefill_tokens_per_s or self._settings.assumed_prefill_tokens_per_s
        decode_speed = load.decode_tokens_per_s or self._settings.assumed_decode_tokens_per_s
        return load.prefill_tokens / prefill_speed + load.decode_tokens / decode_speed

    def routing_stats(self, load: Load, *, is_fenced: bool, weight_version: int) -> dict[str, Any]:
        """Gives what routers read, stamped with the time of its last change.

        An idle replica repeats itself exactly, because Serve sends every change to every router of the cluster.
        """
        rounded = replace(
            load,
            prefill_tokens_per_s=float(f"{load.prefill_tokens_per_s:.1e}"),
            decode_tokens_per_s=float(f"{load.decode_tokens_per_s:.1e}"),
        )
        if self._reported != (rounded, is_fenced, weight_version):
            self._reported = (rounded, is_fenced, weight_version)
            self._reported_at = time.time()
        return {
            "prefill_tokens": rounded.prefill_tokens,
            "decode_tokens": rounded.decode_tokens,
            "prefill_tokens_per_s": rounded.prefill_tokens_per_s,
            "decode_tokens_per_s": rounded.decode_tokens_per_s,
            "is_fenced": is_fenced,
            "weight_version": weight_version,
            "reported_at": self._reported_at,
        }
