"""What a step takes, learned from the steps that ran: a fixed time, and more for each request and each prompt token.

Least squares over the latest steps, older ones fading. What steps alike cannot tell apart (a fleet that only ever
generates one request at a time) is settled by a weak belief: a request costs a small share of the fixed time.
"""

from dataclasses import dataclass

FADING = 0.99
"""Of a step's weight with every later one: the last hundred count."""
BELIEF_WEIGHT = 0.1
"""In steps: a few steps that differ outweigh it."""
BELIEVED_SHARE = 0.05
"""Of the fixed time, what a request is believed to cost, and a prompt token: about what a small model does on a CPU."""
MAX_SURPRISE = 3.0
"""A step that takes longer than so many times what was expected was held up by others, and counts less."""
SOLVE_EVERY = 16
"""Steps between two solutions; each costs some 20 microseconds."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: fixed_s, request_s more for each that generates in it, token_s more for each prompt token."""

    fixed_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0

    def step_s(self, *, num_decoding: int, num_prompt_tokens: int) -> float:
        """Gives how long such a step takes."""
        return self.fixed_s + self.request_s * num_decoding + self.token_s * num_prompt_tokens


class StepTimes:
    """Keeps the sums. One thread only; `cost` is zero until a step was seen, and none of its parts is negative."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self._num_seen = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._times = [0.0] * 3

    def observe(self, *, num_decoding: int, num_prompt_tokens: int, step_s: float) -> None:
        """Takes in one step."""
        row = (1.0, float(num_decoding), float(num_prompt_tokens))
        expected_s = self.cost.step_s(num_decoding=num_decoding, num_prompt_tokens=num_prompt_tokens)
        is_surprise = self._num_seen >= SOLVE_EVERY and step_s > MAX_SURPRISE * expected_s
        weight = MAX_SURPRISE * expected_s / step_s if is_surprise else 1.0
        for i in range(3):
            for j in range(3):
                self._products[i][j] = FADING * self._products[i][j] + weight * row[i] * row[j]
            self._times[i] = FADING * self._times[i] + weight * row[i] * step_s
        self._num_seen += 1
        if self._num_seen <= SOLVE_EVERY or self._num_seen % SOLVE_EVERY == 0:
            self.cost = StepCost(*self._solution())

    def _solution(self) -> list[float]:
        matrix = [list(row) for row in self._products]
        for i in (1, 2):
            # A residual of the belief, as large as that of a step with the usual number of them.
            scale = BELIEF_WEIGHT * max(1.0, matrix[0][i] / matrix[0][0]) ** 2
            matrix[i][i] += scale
            matrix[0][i] -= scale * BELIEVED_SHARE
            matrix[i][0] -= scale * BELIEVED_SHARE
            matrix[0][0] += scale * BELIEVED_SHARE**2
        used = [0, 1, 2]
        while True:
            found = _solve([[matrix[i][j] for j in used] for i in used], [self._times[i] for i in used])
            lowest = min(found)
            if lowest >= 0 or len(used) == 1:
                return [max(0.0, found[used.index(i)]) if i in used else 0.0 for i in range(3)]
            # Time cannot be given back: what would be negative is nothing, and the others explain the steps.
            del used[found.index(lowest)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small symmetric system, positive definite by its belief; by elimination."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    found = [0.0] * size
    for i in range(size - 1, -1, -1):
        rest = sum(matrix[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (right[i] - rest) / matrix[i][i]
    return found
