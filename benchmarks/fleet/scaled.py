"""A run whose fleet grows and shrinks as `serve_app.scaling.decision` decides."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.fleet.simulation import Case, Outcome, Run
from benchmarks.fleet.traffic import Scale, Turn
from serve_app.scaling.decision import FleetLoad, ScalingState, ScalingTargets, decide

DECIDE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """At one decision: seconds since the start, replicas wanted and ready, requests there, and why."""

    now: float
    wanted: int
    ready: int
    num_requests: int
    reason: str


class ScaledRun(Run):
    """As many replicas as are decided, of `case.num_replicas` at most; a new one takes `targets.start_s` to start.

    One that is to go takes no request any more and finishes those it has.
    """

    def __init__(self, case: Case, scale: Scale, targets: ScalingTargets) -> None:
        super().__init__(case, scale)
        self._targets = targets
        self._state = ScalingState()
        self._wanted = targets.minimum
        self._arrived_s = 0.0
        self.moments: list[Moment] = []
        for replica in self.replicas[self._wanted :]:
            self._close(0.0, replica.number)
        self._at(DECIDE_EVERY_S, self._decide)

    @property
    def num_ready(self) -> int:
        return len(self.replicas) - len(self.down)

    def changes(self) -> list[tuple[float, int]]:
        """Gives the decisions that changed something: when, and by how many."""
        pairs = pairwise(self.moments)
        return [(later.now, later.wanted - one.wanted) for one, later in pairs if later.wanted != one.wanted]

    def num_turns(self) -> int:
        """Gives how often the fleet shrank after it had grown, or the other way round."""
        signs = [np.sign(by) for _, by in self.changes()]
        return sum(one != later for one, later in pairwise(signs))

    def _arrive(self, now: float, turn: Turn) -> None:
        work = self._prompt_s(turn.prompt_tokens) + self._answer_s(self.routers[0].expect(turn))
        self._arrived_s += work
        super()._arrive(now, turn)

    def _decide(self, now: float) -> None:
        decision = decide(self._load(now), self._targets, current=self._wanted, now=now, state=self._state)
        self._state = decision.state
        if decision.num_replicas > self._wanted:
            for number in range(self._wanted, decision.num_replicas):
                self._at(now + self._targets.start_s, self._open, number)
        for number in range(decision.num_replicas, self._wanted):
            self._close(now, number)
        self._wanted = decision.num_replicas
        num_requests = sum(replica.num_requests for replica in self.replicas)
        self.moments.append(Moment(now, self._wanted, self.num_ready, num_requests, str(decision.reason)))
        self._at(now + DECIDE_EVERY_S, self._decide)

    def _load(self, now: float) -> FleetLoad:
        told: list[dict[str, Any]] = [
            replica.stats(now) for replica in self.replicas if replica.num_requests or replica.number not in self.down
        ]
        prefill, decode = sum(one["prefill_tokens"] for one in told), sum(one["decode_tokens"] for one in told)
        free = sum(one["free_tokens"] for one in told)
        return FleetLoad(
            num_replicas=len(told),
            prefill_tokens=prefill,
            decode_tokens=decode,
            num_requests=sum(one["num_running"] + one["num_waiting"] for one in told),
            kv_usage=1 - free / (len(told) * self.scale.kv_tokens),
            work_s=self._prompt_s(prefill) + self._answer_s(decode),
            arrived_s=self._arrived_s,
            step_s=self.scale.step_s,
            request_s=self.scale.request_s,
            token_s=self.scale.token_s,
            max_running=self.scale.max_running,
        )

    def _prompt_s(self, num_tokens: float) -> float:
        return num_tokens * (self.scale.token_s + self.scale.step_s / self.scale.step_tokens)

    def _answer_s(self, num_tokens: float) -> float:
        return num_tokens * (self.scale.request_s + self.scale.step_s / self.scale.max_running)

    def _open(self, now: float, number: int) -> None:
        # It may have been called off meanwhile.
        if number < self._wanted and number in self.down:
            self._restart(now, number)

    def _close(self, now: float, number: int) -> None:
        self.down.add(number)
        self.table.report(str(number), {**self.replicas[number].stats(now), "is_fenced": True})


def simulate_scaled(case: Case, scale: Scale, targets: ScalingTargets) -> tuple[Outcome, ScaledRun]:
    """Runs a case with autoscaling; gives what became of its requests, and of the fleet."""
    run = ScaledRun(case, scale, targets)
    run.go()
    return run.outcome(), run
