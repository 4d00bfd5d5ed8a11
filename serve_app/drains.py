"""Draining replicas by name: their requests go over to others, and they take none until told so. No Ray in here."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from engine import InvalidRequest
from serve_app.messages import DrainOrder, DrainRequest, DrainResult, FleetStatus, ReplicaReport

CALL_TIMEOUT_S = 10.0
"""For replicas to close their doors; they do so between two events of their loop."""
ASK_TIMEOUT_S = 5.0
"""For replicas to say whether they take requests; at once, but where one hangs, which health checks soon end."""
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

    async def drain(self, request: DrainRequest) -> DrainResult:
        """Waits until the replicas are empty, or the time is up. Raises InvalidRequest for what cannot be drained."""
        # One at a time, or two that each leave the other's replica would leave none.
        async with self._lock:
            reports = (await self._status()).replicas
            meant = _meant(request, reports)
            if not request.is_forced:
                await self._check_another_serves(meant, reports)
            drained = await self._set(meant, is_drained=True)
        left = await self._wait_until_empty(drained, timeout_s=request.timeout_s)
        if request.is_replaced:
            for replica_id in sorted(drained - left.keys()):
                await self._kill(replica_id)
        return DrainResult(sorted(drained), requests_left=left, is_replaced=request.is_replaced)

    async def undrain(self, request: DrainRequest) -> DrainResult:
        """Lets the replicas take requests again."""
        async with self._lock:
            meant = _meant(request, (await self._status()).replicas)
            return DrainResult(sorted(await self._set(meant, is_drained=False)))

    async def _check_another_serves(self, meant: frozenset[str], reports: list[ReplicaReport]) -> None:
        """Raises InvalidRequest where none but these serves.

        Reports do not tell: they are some seconds old, and a replica that Serve is taking away says it is ready until
        its streams have ended. So those that Serve runs are asked; Serve hands a call to no others.
        """
        in_step = {report.replica_id for report in reports if report.state in IN_SERVICE}
        try:
            answers = await self._call_all("takes_requests_beside", meant, timeout_s=ASK_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequest(
                f"a replica did not say within {ASK_TIMEOUT_S:g} s whether it serves, so maybe none would beside"
                f" {', '.join(sorted(meant))}; try again, or say force",
                "replica_ids",
            ) from None
        if not any(isinstance(answer, str) and answer in in_step for answer in answers):
            raise InvalidRequest(
                f"{', '.join(sorted(meant))} drained would leave no replica that serves; add one first, or say force",
                "replica_ids",
            )

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
