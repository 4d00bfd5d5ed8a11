"""Draining replicas by name: their requests go over to others, and they take none until told so. No Ray in here."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from engine import InvalidRequest
from serve_app.messages import DrainOrder, DrainRequest, DrainResult, FleetStatus, ReplicaReport

CALL_TIMEOUT_S = 10.0
"""For replicas to close their doors; they do so between two events of their loop."""
LOOK_INTERVAL_S = 0.1
"""Between two looks at what is left on them; replicas report once a second."""
IN_SERVICE = frozenset({"ready", "staging", "staged", "paused"})

CallAll = Callable[..., Awaitable[list[Any]]]
"""Calls (method, argument, timeout_s=...) on every running replica and gives the answers, as `broadcast.call_all`."""


class Drains:
    """Closes and opens the doors of replicas, for the controller. Each replica remembers itself whether it is drained.

    A drained replica goes on taking part in swaps. With `replace` it is ended once it is empty, and Serve starts
    another; else it stays until it is undrained, or Serve stops it.
    """

    def __init__(
        self,
        *,
        status: Callable[[], Awaitable[FleetStatus]],
        call_all: CallAll,
        kill: Callable[[str], Awaitable[None]],
    ) -> None:
        self._status = status
        self._call_all = call_all
        self._kill = kill
        self._lock = asyncio.Lock()
        self._drained: set[str] = set()
        """By the latest orders; reports say so a heartbeat later."""

    async def drain(self, request: DrainRequest) -> DrainResult:
        """Waits until the replicas are empty, or the time is up. Raises InvalidRequest for what cannot be drained."""
        # One at a time, or two that each leave the other's replica would leave none.
        async with self._lock:
            reports = (await self._status()).replicas
            meant = _meant(request, reports)
            out = meant | self._drained
            if not request.is_forced and not any(
                report.state in IN_SERVICE and report.replica_id not in out for report in reports
            ):
                raise InvalidRequest(
                    f"{', '.join(sorted(meant))} drained would leave no replica that serves; add one first, or say"
                    " force",
                    "replica_ids",
                )
            drained = await self._set(meant, is_drained=True)
            self._drained = (self._drained | drained) & {report.replica_id for report in reports}
        left = await self._wait_until_empty(drained, timeout_s=request.timeout_s)
        if request.is_replaced:
            for replica_id in sorted(drained - left.keys()):
                await self._kill(replica_id)
        return DrainResult(sorted(drained), requests_left=left, is_replaced=request.is_replaced)

    async def undrain(self, request: DrainRequest) -> DrainResult:
        """Lets the replicas take requests again."""
        async with self._lock:
            meant = _meant(request, (await self._status()).replicas)
            opened = await self._set(meant, is_drained=False)
            self._drained -= opened
            return DrainResult(sorted(opened))

    async def _set(self, meant: frozenset[str], *, is_drained: bool) -> set[str]:
        answers = await self._call_all("set_drained", DrainOrder(meant, is_drained), timeout_s=CALL_TIMEOUT_S)
        return {answer for answer in answers if isinstance(answer, str)}

    async def _wait_until_empty(self, replica_ids: set[str], *, timeout_s: float) -> dict[str, int]:
        """Gives how many requests those still have that are not empty after this time.

        No sooner than each has reported since it was drained; who falls silent is left out of the status soon.
        """
        clock = asyncio.get_running_loop().time
        asked_at, give_up_at = clock(), clock() + timeout_s
        while True:
            reports = [report for report in (await self._status()).replicas if report.replica_id in replica_ids]
            are_heard = all(report.age_s <= clock() - asked_at for report in reports)
            left = {one.replica_id: number for one in reports if (number := one.num_running + one.num_waiting)}
            if are_heard and (not left or clock() >= give_up_at):
                return left
            await asyncio.sleep(LOOK_INTERVAL_S)


def _meant(request: DrainRequest, reports: list[ReplicaReport]) -> frozenset[str]:
    known = {report.replica_id for report in reports}
    if unknown := sorted(set(request.replica_ids) - known):
        raise InvalidRequest(
            f"replica {unknown[0]} is not one of those that report: {', '.join(sorted(known)) or 'none'}", "replica_ids"
        )
    on_node = {report.replica_id for report in reports if request.node is not None and report.node == request.node}
    meant = frozenset(request.replica_ids) | on_node
    if not meant:
        raise InvalidRequest(
            f"no replica reports from node {request.node}" if request.node is not None else "name replicas or a node",
            "replica_ids",
        )
    return meant
