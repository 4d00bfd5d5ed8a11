"""Routers of the simulated fleet: ours, those of others by their published rules, and an oracle.

Each has `choose(turn, now)`, which gives a replica's number, and is told of what it can know: `accepted` with the
requests that the replica then has, as Ray Serve's replicas answer, and `ended`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fleet.replica import Replica
from benchmarks.fleet.traffic import PAGE_SIZE, Turn
from serve_app.routing.fleet_table import FleetTable
from serve_app.routing.output_lengths import OutputLengths, expected_tokens
from serve_app.routing.prefix_map import SentPrefixes, ToldPrefixes, hit_tokens
from serve_app.routing.replica_choice import ReplicaChoice, RoutingPolicy
from serve_app.routing.score import Work, score
from serve_app.routing.sent_work import SentWork

QUEUE_LENGTH_TTL_S = 10.0
"""After which Ray Serve asks a replica again instead of trusting what it knows."""
DEFAULT_EXPECTED = 256


class Router(ABC):
    """What all have: learned lengths, and who is there. `down` is shared: who is down is known to all at once."""

    needs_reports = False

    def __init__(self, replicas: Sequence[Replica], down: set[int], rng: np.random.Generator) -> None:
        self.replicas, self.down, self.rng = replicas, down, rng
        self.lengths = OutputLengths()

    @abstractmethod
    def choose(self, turn: Turn, now: float) -> int:
        """Gives the replica that takes the request."""

    def accepted(self, turn: Turn, now: float) -> None:  # noqa: B027  # not all routers want to know
        """The replica has taken the request."""

    def ended(self, turn: Turn, now: float) -> None:  # noqa: B027  # not all routers want to know
        """The request has ended, or its replica."""

    def learn(self, turn: Turn) -> None:
        """Takes in how long an answer became."""
        self.lengths.add(turn.tenant, "", turn.answer_tokens)

    def expect(self, turn: Turn) -> int:
        """Gives how long the answer is expected to be."""
        learned = self.lengths.expected(turn.tenant, "") if turn.hint is None else None
        return expected_tokens(hint=turn.hint, learned=learned, limit=turn.max_tokens, default=DEFAULT_EXPECTED)

    def _up(self) -> list[int]:
        return [replica.number for replica in self.replicas if replica.number not in self.down]


class Ours(Router):
    """`serve_app.routing.replica_choice`, with reports that lag."""

    needs_reports = True
    policy = RoutingPolicy.PREFIX

    def __init__(
        self, replicas: Sequence[Replica], down: set[int], rng: np.random.Generator, table: FleetTable
    ) -> None:
        super().__init__(replicas, down, rng)
        self.choice = ReplicaChoice(table, policy=self.policy, rng=rng)

    def choose(self, turn: Turn, now: float) -> int:
        turn.expected = self.expect(turn)
        work = Work(turn.prompt_tokens, turn.expected)
        names = turn.names[: (turn.prompt_tokens - 1) // PAGE_SIZE]
        row = int(self.choice.choose(work, names, now=now, page_size=PAGE_SIZE, session=turn.session)[0])
        full = turn.names[: turn.prompt_tokens // PAGE_SIZE]
        turn.token = self.choice.note_sent(row, work, full, now=now, session=turn.session)
        return row

    def accepted(self, turn: Turn, now: float) -> None:
        self.choice.note_count(turn.replica, self.replicas[turn.replica].num_requests, now=now)

    def ended(self, turn: Turn, now: float) -> None:
        self.choice.note_done(turn.token)


class OursWithoutPrefixes(Ours):
    """The same without looking at prefixes."""

    policy = RoutingPolicy.WORK


class RoundRobin(Router):
    """One after the other."""

    def __init__(self, replicas: Sequence[Replica], down: set[int], rng: np.random.Generator) -> None:
        super().__init__(replicas, down, rng)
        self._turn = int(rng.integers(len(replicas)))

    def choose(self, turn: Turn, now: float) -> int:
        while True:
            self._turn = (self._turn + 1) % len(self.replicas)
            if self._turn not in self.down:
                return self._turn


class PowerOfTwo(Router):
    """Ray Serve's default: of two at random the one with fewer requests, by a cache that every answer refreshes.

    A replica answers with all requests it has when it accepts one; the router counts its own endings off. What is
    older than the TTL is asked for anew, which here costs nothing.
    """

    def __init__(self, replicas: Sequence[Replica], down: set[int], rng: np.random.Generator) -> None:
        super().__init__(replicas, down, rng)
        self._known: dict[int, tuple[float, int]] = {}

    def choose(self, turn: Turn, now: float) -> int:
        up = self._up()
        pair = [up[index] for index in self.rng.permutation(len(up))[:2]]
        return min(pair, key=lambda number: self._length(number, now))

    def accepted(self, turn: Turn, now: float) -> None:
        self._known[turn.replica] = (now, self.replicas[turn.replica].num_requests)

    def ended(self, turn: Turn, now: float) -> None:
        if turn.replica in self._known:
            at, length = self._known[turn.replica]
            self._known[turn.replica] = (at, max(0, length - 1))

    def _length(self, number: int, now: float) -> int:
        at, length = self._known.get(number, (-np.inf, 0))
        if now - at > QUEUE_LENGTH_TTL_S:
            length = self.replicas[number].num_requests
            self._known[number] = (now, length)
        return length


class CacheAware(Router):
    """SGLang's cache-aware rule, with the defaults of its command line.

    Where own requests in flight are out of balance, the least loaded; else the replica to which the longest known part
    of the text was sent, if that is more than a share of it; else the least loaded.
    """

    THRESHOLD, BALANCE_ABSOLUTE, BALANCE_RELATIVE = 0.3, 64, 1.5

    def __init__(self, replicas: Sequence[Replica], down: set[int], rng: np.random.Generator) -> None:
        super().__init__(replicas, down, rng)
        self._loads = np.zeros(len(replicas))
        self._tree: dict[int, dict[int, float]] = {}

    def choose(self, turn: Turn, now: float) -> int:
        loads = np.where([replica.number in self.down for replica in self.replicas], np.inf, self._loads)
        lowest, highest = loads.min(), loads[np.isfinite(loads)].max()
        is_imbalanced = highest - lowest > self.BALANCE_ABSOLUTE and highest > self.BALANCE_RELATIVE * lowest
        matched, number = self._match(turn)
        if is_imbalanced or number is None or matched <= self.THRESHOLD * turn.prompt_tokens:
            number = int(self.rng.choice(np.flatnonzero(loads == lowest)))
        for name, _ in turn.segments:
            self._tree.setdefault(name, {})[number] = now
        self._loads[number] += 1
        return number

    def ended(self, turn: Turn, now: float) -> None:
        self._loads[turn.replica] -= 1

    def _match(self, turn: Turn) -> tuple[int, int | None]:
        matched, found = 0, None
        for name, length in turn.segments:
            owners = {number: at for number, at in self._tree.get(name, {}).items() if number not in self.down}
            if not owners:
                break
            matched += length
            found = max(owners, key=lambda number: owners[number])
        return matched, found


class CacheAwareTuned(CacheAware):
    """The same with a balance that suits replicas of few places and routers that see an eighth of the requests."""

    BALANCE_ABSOLUTE = 12


class Oracle(Router):
    """Our score, knowing every queue, every cache and the length of every answer at this moment; one for all."""

    def __init__(self, replicas: Sequence[Replica], down: set[int], rng: np.random.Generator) -> None:
        super().__init__(replicas, down, rng)
        self._table = FleetTable()
        self._names = _LiveNames(replicas)
        self._nothing = SentPrefixes()
        self.changed = {replica.number for replica in replicas}
        """Whose state changed since the last choice; told by the simulation."""
        for replica in replicas:
            self._table.row_of(str(replica.number))

    def expect(self, turn: Turn) -> int:
        return turn.answer_tokens

    def choose(self, turn: Turn, now: float) -> int:
        turn.expected = turn.answer_tokens
        for number in self.changed:
            stats: dict[str, Any] = self.replicas[number].stats(now)
            self._table.report(str(number), {**stats, "is_fenced": number in self.down})
        self.changed.clear()
        unseen = SentWork().unseen(self._table.reported_at, now=now, horizon_s=1.0)
        replicas = self._table.replicas(unseen, now=now)
        names = turn.names[: (turn.prompt_tokens - 1) // PAGE_SIZE]
        tokens = {"page_size": PAGE_SIZE, "step_tokens": replicas.step_tokens}
        hits = hit_tokens(names, self._names, self._nothing, **tokens)
        replicas.is_open[len(self.replicas) :] = False
        scores = score(replicas, Work(turn.prompt_tokens, turn.answer_tokens), hits)
        return int(np.argmin(scores))


class _LiveNames(ToldPrefixes):
    """Who has a block at this moment, as bits."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__()
        self._rows: dict[int, int] = {}
        for replica in replicas:
            replica.on_name = self._note

    @property
    def known(self) -> dict[int, int]:
        return self._rows

    def _note(self, number: int, name: int, is_known: bool) -> None:
        bit = 1 << number
        if is_known:
            self._rows[name] = self._rows.get(name, 0) | bit
        else:
            self._rows[name] = self._rows.get(name, 0) & ~bit


ROUTERS: dict[str, type[Router]] = {
    "ours": Ours,
    "ours without prefixes": OursWithoutPrefixes,
    "power of two": PowerOfTwo,
    "round robin": RoundRobin,
    "cache-aware": CacheAware,
    "cache-aware tuned": CacheAwareTuned,
    "oracle": Oracle,
}
