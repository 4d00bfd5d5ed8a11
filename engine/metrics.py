"""The numbers of one engine: counters that only grow and gauges of this moment."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, cheap to take from any thread; counters count from the start of the manager.

    queued_prefill_tokens: tokens that waiting and prefilling requests still have to compute.
    pending_decode_tokens: upper bound of tokens that admitted requests may still generate.
    prefill_tokens_per_s, decode_tokens_per_s: moving averages over busy steps; 0 until measured.
    fixed_step_s, request_step_s, token_step_s: what a step takes, as `StepCost`; 0 until measured.
    max_step_tokens, max_running: what one step may compute now, and how many requests may run.
    """

    num_waiting: int = 0
    num_running: int = 0
    queued_prefill_tokens: int = 0
    pending_decode_tokens: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_host_blocks: int = 0
    page_size: int = 0
    weight_version: int = 1
    is_paused: bool = False
    is_alive: bool = False
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    fixed_step_s: float = 0.0
    request_step_s: float = 0.0
    token_step_s: float = 0.0
    max_step_tokens: int = 0
    max_running: int = 0
    last_step_s: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    evicted_blocks_total: int = 0
    offloaded_blocks_total: int = 0
    restored_blocks_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    paused_seconds_total: float = 0.0
    weight_swaps_total: int = 0
    step_phase_seconds_total: dict[str, float] = field(default_factory=dict)
    """By phase; the computing itself is in launch or wait, in whichever the device lets the loop stand."""
    requests_total: dict[str, int] = field(default_factory=dict)
    """Ended requests by finish reason."""

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
