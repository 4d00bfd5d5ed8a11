"""How much work a replica has, in tokens and in seconds, as routing and autoscaling are told."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine import EngineStats
from serve_app.routing.prefix_map import pack_names
from serve_app.settings import AutoscalingSettings
from serve_app.streams import TokenStream

UNCOUNTED_S = 0.05
"""A request younger than a step and this is not in the engine's numbers yet."""
DIGITS = 3
"""Of measured times that are told; more would only say how much they waver."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens still to compute of all requests here; their number, with those that the engine has not heard of."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_requests: int = 0


class LoadMeter:
    """Counts what is there, and what has ever come. For one event loop."""

    def __init__(self, settings: AutoscalingSettings) -> None:
        self._settings = settings
        self._told: dict[str, Any] = {}
        self._reported_at = 0.0
        self._arrived_s = 0.0

    def note_arrival(self, stream: TokenStream, stats: EngineStats) -> None:
        """Takes in that a request has come."""
        self._arrived_s += self.work_s(Load(stream.num_prompt_tokens, stream.remaining_tokens), stats)

    def load(self, stats: EngineStats, streams: Iterable[TokenStream]) -> Load:
        """Gives the present load: the engine's queued prompts, and what the open streams are expected to generate."""
        counted_before = time.perf_counter() - stats.last_step_s - UNCOUNTED_S
        prefill_tokens, decode_tokens, num_requests = stats.queued_prefill_tokens, 0, 0
        for stream in streams:
            num_requests += len(stream.sequence_ids)
            decode_tokens += stream.remaining_tokens
            if stream.num_tokens == 0 and stream.arrived_at > counted_before:
                prefill_tokens += stream.num_prompt_tokens + stream.num_resumed_tokens
        return Load(prefill_tokens, decode_tokens, num_requests)

    def work_s(self, load: Load, stats: EngineStats) -> float:
        """Gives the seconds this replica needs for a load with as many requests at once as its target allows.

        Assumed speeds stand in until a step was measured.
        """
        if not stats.fixed_step_s + stats.request_step_s + stats.token_step_s:
            settings = self._settings
            return (
                load.prefill_tokens / settings.assumed_prefill_tokens_per_s
                + load.decode_tokens / settings.assumed_decode_tokens_per_s
            )
        prompt_token_s = stats.token_step_s + stats.fixed_step_s / max(1, stats.max_step_tokens)
        token_s = stats.request_step_s + stats.fixed_step_s / self._full_batch(stats)
        return load.prefill_tokens * prompt_token_s + load.decode_tokens * token_s

    def routing_stats(
        self,
        load: Load,
        stats: EngineStats,
        *,
        prefixes: Sequence[bytes] = (),
        is_fenced: bool = False,
        is_avoided: bool = False,
    ) -> dict[str, Any]:
        """Gives what routers read, stamped with the time of its last change: the fields of `FleetTable.report`.

        page_size: tokens of a block, of which `prefixes` names some. is_avoided: it takes requests, and others are
        better. An idle replica repeats itself exactly, because Serve sends every change to every router of the cluster.
        """
        num_running = min(load.num_requests, stats.num_running)
        told = {
            "prefill_tokens": load.prefill_tokens,
            "decode_tokens": load.decode_tokens,
            "num_running": num_running,
            "num_waiting": load.num_requests - num_running,
            "max_running": stats.max_running,
            "free_tokens": (stats.num_blocks - stats.num_used_blocks) * stats.page_size,
            "total_tokens": stats.num_blocks * stats.page_size,
            "step_s": _rounded(stats.fixed_step_s),
            "request_s": _rounded(stats.request_step_s),
            "token_s": _rounded(stats.token_step_s),
            "step_tokens": stats.max_step_tokens,
            "page_size": stats.page_size,
            "weight_version": stats.weight_version,
            "is_fenced": is_fenced,
            "is_avoided": is_avoided,
            "prefixes": pack_names(prefixes),
        }
        if told != self._told:
            self._told, self._reported_at = told, time.time()
        return {**told, "reported_at": self._reported_at}

    def autoscaling_stats(self, load: Load, stats: EngineStats) -> dict[str, float]:
        """Gives what the autoscaling policy reads: the fields of `FleetLoad`, for this replica alone."""
        return {
            "prefill_tokens": float(load.prefill_tokens),
            "decode_tokens": float(load.decode_tokens),
            "num_requests": float(load.num_requests),
            "kv_usage": stats.kv_usage,
            "work_s": self.work_s(load, stats),
            "arrived_s": self._arrived_s,
            "step_s": stats.fixed_step_s,
            "request_s": stats.request_step_s,
            "token_s": stats.token_step_s,
            "max_running": float(stats.max_running),
        }

    def _full_batch(self, stats: EngineStats) -> float:
        """Gives how many requests may generate at once so that the time between two tokens stays within its target."""
        spare_s = self._settings.target_token_time_s - stats.fixed_step_s
        fitting = spare_s / stats.request_step_s if stats.request_step_s > 0 else float(stats.max_running)
        return max(1.0, min(fitting, float(stats.max_running)))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS - 1}e}")
