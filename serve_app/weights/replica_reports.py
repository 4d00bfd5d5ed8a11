"""What the controller has heard of the replicas lately."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Set
from dataclasses import replace
from typing import Any

from serve_app.messages import ReplicaReport, SwapOrder, SwapReply

REPLICA_STATES = ("loading", "ready", "drained", "staging", "staged", "paused", "draining", "lagging", "unhealthy")


class ReplicaReports:
    """The latest report of each replica, until it was silent for too long. One event loop only, and its clock."""

    def __init__(self, *, forget_after_s: float) -> None:
        self._forget_after_s = forget_after_s
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._reported = asyncio.Event()

    def add(self, report: ReplicaReport) -> None:
        """Keeps a report."""
        self._reports[report.replica_id] = (_now(), report)
        self._reported.set()

    def forget(self, replica_id: str) -> None:
        """Drops what was heard of a replica that was ended."""
        self._reports.pop(replica_id, None)
        self._reported.set()

    def names(self) -> Set[str]:
        """Gives the replicas that were heard of lately, and forgets the others."""
        oldest = _now() - self._forget_after_s
        self._reports = {name: entry for name, entry in self._reports.items() if entry[0] >= oldest}
        return self._reports.keys()

    def newest_version(self) -> ReplicaReport | None:
        """Gives the report of the highest version."""
        return max((self._reports[name][1] for name in self.names()), key=lambda report: report.version, default=None)

    def replies(self, swap_id: str, phase: str) -> dict[str, SwapReply]:
        """Gives the replies to a phase of a swap that reports have brought, by replica."""
        found = {name: self._reports[name][1].reply for name in self.names()}
        return {
            name: reply
            for name, reply in found.items()
            if reply is not None and (reply.swap_id, reply.phase) == (swap_id, phase)
        }

    def listed(self, committed_version: int) -> list[ReplicaReport]:
        """Gives the reports by name, with their ages and with the state that the committed version makes of each."""
        now = _now()
        return [
            replace(report, age_s=round(now - at, 3), state=_state(report, committed_version))
            for _, (at, report) in sorted((name, self._reports[name]) for name in self.names())
        ]

    def count_states(self, committed_version: int) -> dict[str, int]:
        """Gives how many replicas are in each state there is."""
        states = Counter(report.state for report in self.listed(committed_version))
        return {state: states[state] for state in REPLICA_STATES}

    def note_commit(self, reply: SwapReply, order: SwapOrder) -> None:
        """Keeps a report right from a commit until the next heartbeat."""
        if reply.replica_id in self._reports:
            at, report = self._reports[reply.replica_id]
            report = replace(
                report, version=reply.version, source=order.source, cast=order.cast, state="ready", error=None
            )
            self._reports[reply.replica_id] = (at, report)

    def next_report(self) -> Coroutine[Any, Any, bool]:
        """Gives what waits for the next report of any replica, from now on."""
        self._reported.clear()
        return self._reported.wait()

    async def wait_for(self, num_replicas: int, *, timeout_s: float) -> None:
        """Waits until so many replicas have reported, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.names()) < num_replicas:
                    await self.next_report()
        except TimeoutError:
            return


def _now() -> float:
    return asyncio.get_running_loop().time()


def _state(report: ReplicaReport, committed_version: int) -> str:
    if report.state in ("ready", "drained") and report.version < committed_version:
        return "lagging"
    return report.state
