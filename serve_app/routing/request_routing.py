"""Which replica takes a request, as one router process knows it: the reports of replicas, and what it sent itself.

Knows nothing of Ray. The policy that Ray asks (`work_router`) and admission share one of these, on different threads.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from engine import prefix_digests
from serve_app.messages import GenerateRequest
from serve_app.routing.expected_work import expected_work
from serve_app.routing.fleet_table import FleetTable
from serve_app.routing.prefix_map import short_names
from serve_app.routing.prospect import Prospect, prospect
from serve_app.routing.replica_choice import ReplicaChoice, RoutingPolicy
from serve_app.routing.score import Bools, Work

MAX_BLOCKS = 1024
"""Of a prompt that are named to find its prefix; naming them takes about a millisecond."""
MAX_REMEMBERED = 4096
"""Requests whose names and expected hits are kept until they are sent, and until their first token."""
REASONS = ("prefix", "session", "version", "load", "turn", "waited", "fallback")
"""Why a replica was chosen: it has a part of the prompt; it had the session; few have the weights that were asked for;
its load; its turn, by a policy that looks at no load. waited: none was open. fallback: the policy failed."""

K = TypeVar("K")
V = TypeVar("V")


class RequestRouting:
    """The knowledge and the choices of one process. For any thread."""

    def __init__(self, policy: str, *, seed: int | None = None) -> None:
        self.policy = RoutingPolicy(policy)
        self._lock = Lock()
        self._table = FleetTable()
        self._choice = ReplicaChoice(self._table, policy=self.policy, rng=np.random.default_rng(seed))
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._names: OrderedDict[tuple[str, int], list[int]] = OrderedDict()
        self._hits: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._sent_hits: OrderedDict[str, float] = OrderedDict()
        self.reasons: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Choices so far, by reason."""

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes in the reports of all replicas there are, by name; an empty one is of a replica that has not told.

        Nonsense in one raises, after the others were taken in; that replica then stays as it was known.
        """
        with self._lock:
            for name in self._reports.keys() - reports.keys():
                self._choice.forget(self._table.row_of(name))
                self._table.forget(name)
                del self._reports[name]
            failures = [error for name, report in reports.items() if (error := self._take_in(name, report))]
        if failures:
            raise failures[0]

    def note_count(self, name: str, num_requests: int) -> None:
        """Takes in how many requests a replica has in all."""
        with self._lock:
            if name in self._reports:
                self._choice.note_count(self._table.row_of(name), num_requests, now=time.time())

    def choose(self, request: GenerateRequest | None, candidates: Iterable[str]) -> list[str]:
        """Gives those of the candidates that may take the request, the best first; None generates nothing."""
        with self._lock:
            known = [name for name in candidates if name in self._reports]
            fitting = self._fitting(request, known)
            work = Work()
            names: Sequence[int] = ()
            if request is not None:
                work, names = expected_work(request), self._names_of(request, self._usual_version(fitting))
            session = None if request is None else request.hints.session_id
            rows = self._choice.choose(
                work,
                names,
                now=time.time(),
                page_size=self._page_size(),
                session=session,
                candidates=self._mask(fitting),
            )
            chosen = self._table.named(rows)
            if request is not None:
                reason = self._reason(rows.tolist(), session, is_few=len(fitting) < len(self._fitting(None, known)))
                self.reasons[reason] += 1
                found = {name: self._choice.expected_hit(row) for row, name in zip(rows.tolist(), chosen, strict=True)}
                _remember(self._hits, request.request_id, {name: hit for name, hit in found.items() if hit})
            return chosen

    def sent(self, request: GenerateRequest, name: str) -> int | None:
        """Counts a request as sent to a replica; gives what `done` wants, None where that replica is gone."""
        with self._lock:
            if name not in self._reports:
                return None
            hit = self._hits.pop(request.request_id, {}).get(name, 0.0)
            _remember(self._sent_hits, request.request_id, hit)
            return self._choice.note_sent(
                self._table.row_of(name),
                expected_work(request),
                self._names_of(request, self._version_of(name)),
                now=time.time(),
                session=request.hints.session_id,
                hit_tokens=hit,
            )

    def done(self, token: int) -> None:
        """The request has ended at its replica."""
        with self._lock:
            self._choice.note_done(token)

    def take_expected_hit(self, request_id: str) -> float | None:
        """Gives, once, how many tokens of the prompt its replica was expected to have; None where it is not known."""
        with self._lock:
            return self._sent_hits.pop(request_id, None)

    def is_served(self, request: GenerateRequest) -> bool:
        """Gives whether an open replica has told of weights that the request accepts."""
        with self._lock:
            return any(
                request.accepts(self._version_of(name))
                for name, report in self._reports.items()
                if not report.get("is_fenced")
            )

    def prospect(self, request: GenerateRequest) -> Prospect | None:
        """Gives what a request may expect; None while no replica is open that has told its speed."""
        with self._lock:
            fitting = [name for name in self._fitting(request, self._reports) if self._reports[name].get("step_s")]
            work, names = expected_work(request), self._names_of(request, self._usual_version(fitting))
            replicas, hits = self._choice.look(
                work, names, now=time.time(), page_size=self._page_size(), candidates=self._mask(fitting)
            )
            return prospect(replicas, work, hits, mean_work=self._choice.mean_work)

    def _take_in(self, name: str, report: Mapping[str, Any]) -> Exception | None:
        try:
            if self._reports.get(name) != report:
                self._table.report(name, report)
                self._reports[name] = report
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            self._reports.setdefault(name, {})
            self._table.row_of(name)
            return error
        return None

    def _fitting(self, request: GenerateRequest | None, names: Iterable[str]) -> list[str]:
        """Gives the open ones that a request accepts, as far as reports tell; of those others are better than paused.

        Where none has weights that it accepts, all that are open: one of them refuses, and whoever asked can wait or
        give up; offered to none, the request would hang.
        """
        found = [name for name in names if not self._reports[name].get("is_fenced")]
        if request is not None:
            found = [name for name in found if request.accepts(self._version_of(name))] or found
            found = [name for name in found if name not in request.excluded] or found
        return [name for name in found if not self._reports[name].get("is_avoided")] or found

    def _names_of(self, request: GenerateRequest, version: int) -> Sequence[int]:
        page_size = self._page_size()
        if self.policy != RoutingPolicy.PREFIX or not version or not page_size:
            return ()
        key = (request.request_id, version)
        if key not in self._names:
            known = request.prompt_ids[: MAX_BLOCKS * page_size]
            digests = prefix_digests(known, page_size=page_size, version=version, salt=request.cache_salt)
            _remember(self._names, key, short_names(digests))
        return self._names[key]

    def _usual_version(self, names: Collection[str]) -> int:
        """Gives the version of the most of them: while weights change on the way, prefixes of others are not found."""
        return Counter(map(self._version_of, names)).most_common(1)[0][0] if names else 0

    def _version_of(self, name: str) -> int:
        return int(self._reports[name].get("weight_version", 0))

    def _page_size(self) -> int:
        return next((int(size) for report in self._reports.values() if (size := report.get("page_size"))), 0)

    def _mask(self, names: Iterable[str]) -> Bools:
        rows = [self._table.row_of(name) for name in names]
        mask = np.zeros(len(self._table), dtype=np.bool_)
        mask[rows] = True
        return mask

    def _reason(self, rows: Sequence[int], session: str | None, *, is_few: bool) -> str:
        if not rows:
            return "waited"
        if is_few:
            return "version"
        if self.policy == RoutingPolicy.ROUND_ROBIN:
            return "turn"
        if session is not None and self._choice.row_of_session(session) == rows[0]:
            return "session"
        return "prefix" if self._choice.expected_hit(rows[0]) else "load"


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    if len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
