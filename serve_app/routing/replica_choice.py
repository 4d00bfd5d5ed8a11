"""Which replica takes a request, by one of four policies. Knows nothing of Ray: `work_router` asks it there, and the
simulation of `benchmarks/fleet_sim.py` here.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from serve_app.routing.fleet_table import REPORT_MARGIN_S, FleetTable
from serve_app.routing.prefix_map import SentPrefixes, hit_tokens
from serve_app.routing.score import Bools, Floats, Ints, Replicas, Work, estimate, price, ranked
from serve_app.routing.sent_work import Counts, SentWork

SESSION_SHARE = 0.9
"""Of its price, what the replica costs that had the session before: who talks on stays, unless it is too busy."""
SESSION_SLACK_S = 0.05
"""And so much less: nobody notices it, and measured times of idle replicas differ by milliseconds for no reason."""
MARGIN_SHARE = 0.02
"""Prices this close to each other are the same, as far as anybody can know."""
MAX_SESSIONS = 65_536
HORIZON_S = 10.0
"""What was sent longer ago is in every report, or its replica is silent and closed by others."""
SMOOTHING = 0.02
"""Of the usual work of a request: the last fifty count."""


class RoutingPolicy(StrEnum):
    """How replicas are chosen.

    PREFIX: by estimated time, cached prefixes included. WORK: by estimated time alone. POWER_OF_TWO: of two at random
    the one with fewer requests. ROUND_ROBIN: one after the other.
    """

    PREFIX = "prefix"
    WORK = "work"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"


class ReplicaChoice:
    """The choices of one router. One thread only; several routers may share a table, and nothing else."""

    def __init__(self, table: FleetTable, *, policy: RoutingPolicy, rng: np.random.Generator) -> None:
        self._table = table
        self._policy = policy
        self._rng = rng
        self._sent = SentWork()
        self._counts = Counts()
        self._sent_prefixes = SentPrefixes()
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self.mean_work = (0.0, 0.0)
        """Tokens of a usual request: of its prompt, as far as it is not cached, and of its answer."""
        self._turn = 0
        self._hits: Floats = np.zeros(0)
        self._first_token_s: Floats = np.zeros(0)
        self._now = 0.0
        self._under_way: dict[int, tuple[int, Sequence[int]]] = {}

    def choose(
        self,
        work: Work,
        names: Sequence[int] = (),
        *,
        now: float,
        page_size: int = 1,
        session: str | None = None,
        candidates: Bools | None = None,
    ) -> Ints:
        """Gives rows of the table, the best first; none where every replica is closed.

        names: `short_names` of the full blocks of the prompt, page_size tokens each. candidates: the rows to choose
        from; None is all.
        """
        replicas, self._hits = self.look(work, names, now=now, page_size=page_size, candidates=candidates)
        if self._policy in (RoutingPolicy.ROUND_ROBIN, RoutingPolicy.POWER_OF_TWO):
            return self._simple(replicas)
        times = estimate(replicas, work, self._hits)
        self._first_token_s = times.first_token_s
        scores = price(times, replicas.is_open)
        best = float(scores.min(initial=np.inf))
        row = self.row_of_session(session)
        if row is None and session is not None:
            # Other routers, which do not know where it was, send it there as well.
            row = self._table.home_of(session, replicas.is_open)
        if row is not None and row < len(scores):
            scores[row] = SESSION_SHARE * scores[row] - SESSION_SLACK_S
        return ranked(scores, self._rng, MARGIN_SHARE * best if np.isfinite(best) else 0.0)

    def look(
        self,
        work: Work,
        names: Sequence[int] = (),
        *,
        now: float,
        page_size: int = 1,
        candidates: Bools | None = None,
    ) -> tuple[Replicas, Floats]:
        """Gives what is known of the replicas, and the tokens of the prompt that each is expected to have cached."""
        unseen = self._sent.unseen(self._table.reported_at - REPORT_MARGIN_S, now=now, horizon_s=HORIZON_S)
        others = self._counts.beyond(self._table.num_requests() + unseen.num_requests, self._table.reported_at)
        replicas = self._table.replicas(unseen, others, mean_work=self.mean_work, now=now)
        if candidates is not None:
            replicas.is_open = replicas.is_open & candidates
        if self._policy != RoutingPolicy.PREFIX or not names:
            return replicas, np.zeros(len(replicas))
        self._sent_prefixes.settle(now)
        found = hit_tokens(
            names, self._table.prefixes, self._sent_prefixes, page_size=page_size, step_tokens=replicas.step_tokens
        )
        return replicas, np.minimum(found, work.prefill_tokens)

    def expected_hit(self, row: int) -> float:
        """Gives how many tokens of the prompt last chosen for the replica in this row is expected to have cached."""
        return float(self._hits[row]) if row < len(self._hits) else 0.0

    def row_of_session(self, session: str | None) -> int | None:
        """Gives the row to which a session was sent last; None where it is not known any more."""
        return None if session is None else self._sessions.get(session)

    def note_sent(
        self,
        row: int,
        work: Work,
        names: Sequence[int] = (),
        *,
        now: float,
        session: str | None = None,
        hit_tokens: float | None = None,
    ) -> int:
        """Counts a request as sent to a replica; gives what `note_done` wants.

        hit_tokens: of its prompt, as `expected_hit` gave them; None takes those of the last choice.
        """
        miss = max(1.0, work.prefill_tokens - (self.expected_hit(row) if hit_tokens is None else hit_tokens))
        prefill, decode = self.mean_work
        self.mean_work = (
            prefill + SMOOTHING * (miss - prefill),
            decode + SMOOTHING * (work.decode_tokens - decode),
        )
        ready_s = float(self._first_token_s[row]) if row < len(self._first_token_s) else 0.0
        self._sent_prefixes.add(row, names, now=now, ready_at=now + ready_s)
        self._now = now
        if session is not None:
            self._sessions[session] = row
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        token = self._sent.add(row, work, miss_tokens=miss, now=now)
        self._under_way[token] = (row, names)
        return token

    def note_count(self, row: int, num_requests: int, *, now: float) -> None:
        """Takes in how many requests a replica has in all, as it tells whenever it accepts one."""
        self._counts.note(row, num_requests, now=now)

    def note_done(self, token: int) -> None:
        """The request has ended, and with it everything that had to be computed for it."""
        self._sent.done(token)
        row, names = self._under_way.pop(token, (-1, ()))
        if row >= 0:
            self._sent_prefixes.add(row, names, now=self._now)

    def forget(self, row: int) -> None:
        """Forgets a replica that is gone, before its row is used again."""
        self._sent.forget_row(row)
        self._counts.note(row, 0, now=-np.inf)
        self._sent_prefixes.forget(row)
        self._under_way = {token: sent for token, sent in self._under_way.items() if sent[0] != row}
        self._sessions = OrderedDict((key, at) for key, at in self._sessions.items() if at != row)

    def _simple(self, replicas: Replicas) -> Ints:
        """Gives the choice of the policies that look at nothing, or at the number of requests alone."""
        open_rows = np.flatnonzero(replicas.is_open)
        if self._policy == RoutingPolicy.ROUND_ROBIN:
            self._turn += 1
            return np.roll(open_rows, -self._turn)
        order = self._rng.permutation(open_rows)
        if len(order) > 1:
            there = replicas.num_running + replicas.num_waiting
            if there[order[1]] < there[order[0]]:
                order[[0, 1]] = order[[1, 0]]
        return order
