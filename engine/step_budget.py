"""How many tokens a step may compute so that it stays short: measured, not guessed."""

from engine.plan import StepPlan
from engine.step_times import StepTimes

SMOOTHING = 0.3
"""Weight of the newest step: three steps after a change the estimate has followed it by two thirds."""
MIN_MEASURED_TOKENS = 32
"""Shorter steps are bound by reading the weights and say nothing about the cost of a token."""

ROUND_TOKENS = 16
"""oneDNN prepares a product for each number of rows it meets, which costs a step some 10 ms: so it meets fewer."""


class StepBudget:
    """Learns the speed of this machine from the steps it ran. Speeds are tokens per second, 0 until measured."""

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        target_step_s: float | None,
        first_tokens: int = 128,
    ) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._target_step_s = target_step_s
        self._first_tokens = first_tokens
        self.times = StepTimes()
        self.prefill_tokens_per_s = 0.0
        self.decode_tokens_per_s = 0.0

    def max_tokens(self) -> int:
        """Gives the number of tokens that the next step should not exceed."""
        if self._target_step_s is None:
            return self._max_batch_tokens
        if self.prefill_tokens_per_s == 0:
            return min(self._first_tokens, self._max_batch_tokens)
        fitting = int(self.prefill_tokens_per_s * self._target_step_s)
        if fitting > ROUND_TOKENS:
            fitting -= fitting % ROUND_TOKENS
        return max(1, min(fitting, self._max_batch_tokens))

    def observe(self, plan: StepPlan, step_s: float) -> None:
        """Takes in how long a step took."""
        num_tokens = plan.num_tokens
        num_decoding = plan.num_decoding
        self.times.observe(num_decoding=num_decoding, num_prompt_tokens=num_tokens - num_decoding, step_s=step_s)
        if num_tokens - num_decoding >= MIN_MEASURED_TOKENS:
            self.prefill_tokens_per_s = _follow(self.prefill_tokens_per_s, num_tokens / step_s)
        elif num_decoding == num_tokens:
            self.decode_tokens_per_s = _follow(self.decode_tokens_per_s, num_tokens / step_s)


def _follow(average: float, value: float) -> float:
    return value if average == 0 else average + SMOOTHING * (value - average)
