"""One run: a workload, a fleet, a kind of router; what became of every request."""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from benchmarks.fleet.replica import Replica
from benchmarks.fleet.routers import ROUTERS, Oracle, Ours, Router
from benchmarks.fleet.traffic import Scale, Turn, draw, load
from serve_app.routing.fleet_table import FleetTable

PREFIXES_EVERY_S = 1.0
MAX_NAMES = 1024
"""4 KiB a report at most."""
FIRST_SHARE = 0.25
LONG_FIRST_SHARE = 0.5
"""Of the time in which sessions begin: it fills caches and batches, and what arrives in it is not measured. The longer
one for rollouts, whose longest answers take minutes."""
RETRY_S = 0.1
"""From the death of a replica until its requests are elsewhere."""
RESTART_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """What to run. delay_s: the median age of what routers know; reports come as often. crash_at: share of the run."""

    workload: str
    policy: str
    utilisation: float
    num_replicas: int = 64
    num_routers: int = 8
    delay_s: float = 0.2
    turns_per_replica: int = 150
    crash_at: float | None = None


@dataclass(slots=True)
class Outcome:
    """Of the measured requests, in order of their numbers: seconds until the first token, and for each further one."""

    case: Case
    first_token_s: Any
    token_s: Any
    is_good: Any
    goodput: float
    """Good requests a second and replica."""
    hit_share: float
    imbalance: float
    """Busy time of the busiest replica over the mean."""
    busy_share: float
    decision_us: Any
    num_lost: int = 0
    wall_s: float = 0.0

    def quantile(self, share: float) -> float:
        """Gives the time to the first token that this share of the requests had at most."""
        return float(np.quantile(self.first_token_s, share))


def simulate(case: Case, scale: Scale) -> Outcome:
    """Runs a case to the end of its last request."""
    started = time.perf_counter()
    run = Run(case, scale)
    run.go()
    outcome = run.outcome()
    outcome.wall_s = time.perf_counter() - started
    return outcome


class Run:
    """A run in progress; `go` once, then `outcome`."""

    def __init__(self, case: Case, scale: Scale) -> None:
        self.case = case
        self.scale = scale
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.decisions: list[float] = []
        self.num_lost = 0
        self.workload = load(case.workload)
        num_turns = case.turns_per_replica * case.num_replicas
        self.traffic = draw(self.workload, self.scale, num_replicas=case.num_replicas,
                            utilisation=case.utilisation, num_turns=num_turns)  # fmt: skip
        self.replicas = [Replica(number, self.scale) for number in range(case.num_replicas)]
        self.due = [float("inf")] * case.num_replicas
        self.down: set[int] = set()
        self.rng = np.random.default_rng([self.workload["seed"], 99])
        self.table = FleetTable()
        for replica in self.replicas:
            self.table.row_of(str(replica.number))
        self.routers = self._make_routers()
        self.oracle = self.routers[0] if isinstance(self.routers[0], Oracle) else None
        self.told_idle = [False] * case.num_replicas
        self.packed = [b""] * case.num_replicas
        self.packed_at = [-np.inf] * case.num_replicas
        self.last_arrival = max(turn.arrival for turn in self.traffic.first)
        self.num_open = 0
        for turn in self.traffic.first:
            self._at(turn.arrival, self._arrive, turn)
        if self.routers[0].needs_reports:
            for number, phase in enumerate(self.rng.random(case.num_replicas)):
                self._at(phase * case.delay_s, self._report, number)
        if case.crash_at is not None:
            self._at(self._crash_time(), self._crash, 0)

    def go(self) -> None:
        """Runs until every request has ended that is measured."""
        now = 0.0
        while self.num_open or now <= self.last_arrival:
            now, _, act, arguments = heapq.heappop(self.events)
            act(now, *arguments)

    def outcome(self) -> Outcome:
        """Gives what was measured."""
        last = self.last_arrival
        share = LONG_FIRST_SHARE if self.workload["kind"] == "rollouts" else FIRST_SHARE
        turns = [turn for turn in self.traffic.all if share * last <= turn.sent_at <= last]
        first = np.array([turn.first_token_at - turn.arrival for turn in turns])
        rest = np.array([turn.ended_at - turn.first_token_at for turn in turns])
        answers = np.array([turn.answer_tokens for turn in turns])
        prompts = np.array([turn.prompt_tokens for turn in turns])
        token_s = rest / np.maximum(answers - 1, 1)
        slo, scale = self.workload["slo"], self.scale
        alone = np.array([scale.prefill_s(turn.prompt_tokens) for turn in turns])
        full_step_s = scale.step_s + scale.request_s * scale.max_running
        is_good = (first <= slo["first_token_stretch"] * alone) & (token_s <= slo["token_stretch"] * full_step_s)
        span = (1 - share) * last
        busy = np.array([replica.busy_s for replica in self.replicas])
        return Outcome(
            case=self.case,
            first_token_s=first,
            token_s=token_s,
            is_good=is_good,
            goodput=float(is_good.sum()) / span / len(self.replicas),
            hit_share=float(sum(turn.hit_tokens for turn in turns) / prompts.sum()),
            imbalance=float(busy.max() / busy.mean()),
            busy_share=float(busy.mean() / max(turn.ended_at for turn in self.traffic.all)),
            decision_us=np.array(self.decisions) * 1e6,
            num_lost=self.num_lost,
        )

    def _make_routers(self) -> list[Router]:
        kind = ROUTERS[self.case.policy]
        if kind is Oracle:
            return [Oracle(self.replicas, self.down, self.rng)]
        rngs = self.rng.spawn(self.case.num_routers)
        if issubclass(kind, Ours):
            return [kind(self.replicas, self.down, rng, self.table) for rng in rngs]
        return [kind(self.replicas, self.down, rng) for rng in rngs]

    def _at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when, next(self.order), act, arguments))

    def _arrive(self, now: float, turn: Turn) -> None:
        turn.arrival = now
        self.num_open += now <= self.last_arrival
        # A client keeps its connection, so a session stays with a router; clients know nothing of replicas.
        key = turn.session if turn.session is not None else turn.number
        turn.sent_at = now
        turn.router = self.routers[hash_of(key) % len(self.routers)]
        self._send(now, turn, 0)

    def _send(self, now: float, turn: Turn, generated: int) -> None:
        # Of this thread alone, since the machine may do other things as well.
        began = time.thread_time()
        turn.replica = turn.router.choose(turn, now)
        self.decisions.append(time.thread_time() - began)
        replica = self.replicas[turn.replica]
        replica.add(turn, turn.expected, now, generated)
        self._reschedule(replica)
        turn.router.accepted(turn, now)

    def _reschedule(self, replica: Replica) -> None:
        number, due = replica.number, replica.busy_until
        if self.oracle is not None:
            self.oracle.changed.add(number)
        if due != self.due[number]:
            self.due[number] = due
            if due < float("inf"):
                self._at(due, self._step, number)

    def _step(self, now: float, number: int) -> None:
        if now != self.due[number]:
            return
        replica = self.replicas[number]
        _, ended = replica.advance(now)
        self.due[number] = float("nan")
        self._reschedule(replica)
        for turn in ended:
            turn.ended_at = now
            turn.router.learn(turn)
            turn.router.ended(turn, now)
            self.num_open -= turn.arrival <= self.last_arrival
            if turn.next is not None:
                self._at(now + turn.think_s, self._arrive, turn.next)

    def _report(self, now: float, number: int) -> None:
        replica = self.replicas[number]
        # Who has nothing to do has told so once, and what does not change is not sent.
        if number not in self.down and (replica.num_requests or not self.told_idle[number]):
            self.told_idle[number] = not replica.num_requests
            if replica.has_new_names and now - self.packed_at[number] >= PREFIXES_EVERY_S:
                names = np.array(replica.newest_names(MAX_NAMES), dtype="<u4")
                self.packed[number], self.packed_at[number] = names.tobytes(), now
                replica.has_new_names = False
            stats: dict[str, Any] = replica.stats(now)
            stats["prefixes"] = self.packed[number]
            self._at(now + self.case.delay_s / 2, self._hear, number, stats)
        self._at(now + self.case.delay_s, self._report, number)

    def _hear(self, now: float, number: int, stats: dict[str, Any]) -> None:
        self.table.report(str(number), {**stats, "is_fenced": number in self.down})

    def _crash_time(self) -> float:
        last = self.last_arrival
        bursts = self.workload.get("bursts")
        when = self.case.crash_at * last if self.case.crash_at is not None else 0.0
        if bursts:
            # In the middle of a burst.
            when = when // bursts["period_s"] * bursts["period_s"] + bursts["burst_s"] / 2
        return float(when)

    def _crash(self, now: float, number: int) -> None:
        lost = self.replicas[number].crash()
        self.down.add(number)
        self._reschedule(self.replicas[number])
        for router in self.routers:
            if isinstance(router, Ours):
                router.choice.forget(number)
        if self.routers[0].needs_reports:
            self.table.report(str(number), {"is_fenced": True, "reported_at": now})
        self.packed[number] = b""
        self.num_lost = len(lost)
        for turn, generated in lost:
            turn.router.ended(turn, now)
            self._at(now + RETRY_S, self._send, turn, generated)
        self._at(now + RESTART_S, self._restart, number)

    def _restart(self, now: float, number: int) -> None:
        self.down.discard(number)
        self._reschedule(self.replicas[number])
        if self.routers[0].needs_reports:
            self.table.report(str(number), {**self.replicas[number].stats(now), "prefixes": b""})


def hash_of(key: str | int) -> int:
    """Gives the same number for the same key in every run."""
    return int.from_bytes(str(key).encode(), "little") * 0x9E3779B97F4A7C15 >> 13 & 0xFFFFFFFF
