"""Requests for weights that are yet to come: they wait here, before the line, where they are in nobody's way."""

import asyncio
import math
from dataclasses import replace

from engine import PitstopError
from serve_app.messages import GenerateRequest
from serve_app.metrics import Recorder
from serve_app.protocol.errors import LineFull, WeightVersionUnavailable
from serve_app.router.fleet import Fleet
from serve_app.router.version_watch import FleetVersions
from serve_app.settings import LimitSettings


class VersionGate:
    """Holds back what no replica can answer yet. For one event loop.

    Invariant: whoever waits holds neither a place nor tokens of the line.
    """

    def __init__(self, fleet: Fleet, limits: LimitSettings, *, max_waiting: int, recorder: Recorder) -> None:
        self._fleet = fleet
        self._limits = limits
        self._max_waiting = max_waiting
        self._recorder = recorder
        self.num_waiting = 0
        self._add(0)

    async def enter(self, request: GenerateRequest) -> GenerateRequest:
        """Waits until a replica serves the least version of a request, and gives it with the time that it has left.

        A pinned request, and one that goes on with an answer, waits for none: its stream knows what becomes of it.
        Raises LineFull, and WeightVersionUnavailable `limits.version_wait_s` after its arrival.
        """
        least = request.min_weight_version
        if least is None or (request.weight_version, request.resume_version) != (None, None) or self._knows(request):
            return request
        if self.num_waiting >= self._max_waiting:
            wait_s = max(1, math.ceil(self._limits.version_wait_s))
            raise LineFull(
                f"{self.num_waiting} requests wait for weights that are to come, which is the limit; retry in {wait_s}"
                " s, or when that version is committed",
                self.num_waiting,
                retry_after_s=wait_s,
            )
        self._add(1)
        try:
            return await self._wait(request, least)
        finally:
            self._add(-1)

    def _add(self, number: int) -> None:
        self.num_waiting += number
        self._recorder.set_gauge("pitstop_requests_waiting_for_weights", value=self.num_waiting)

    async def _wait(self, request: GenerateRequest, least: int) -> GenerateRequest:
        clock = asyncio.get_running_loop().time
        arrived_at = clock()
        timeout_s = self._limits.request_timeout_s if request.timeout_s is None else request.timeout_s
        wait_s = min(self._limits.version_wait_s, timeout_s)
        while (versions := await self._versions()) is not None and not _is_served(request, versions):
            if clock() >= arrived_at + wait_s:
                raise not_in_time(least, versions, wait_s=wait_s)
        return replace(request, timeout_s=max(0.0, timeout_s - (clock() - arrived_at)))

    async def _versions(self) -> FleetVersions | None:
        try:
            return await self._fleet.versions()
        except PitstopError:
            # A controller that restarts stops nobody: the replica that is asked knows its version.
            return None

    def _knows(self, request: GenerateRequest) -> bool:
        """Gives whether it is certain without a question; replicas never go back to an earlier version."""
        routing = self._fleet.routing()
        return routing is not None and routing.is_served(request)


def not_in_time(least: int | None, versions: FleetVersions, *, wait_s: float) -> WeightVersionUnavailable:
    """Gives what refuses a request whose least version has not come."""
    return WeightVersionUnavailable(
        f"min_weight_version is {least} and the committed weight version is {versions.committed}; it did not come"
        f" within {round(wait_s, 1):g} s, ask again after the swap"
    )


def _is_served(request: GenerateRequest, versions: FleetVersions) -> bool:
    if not versions.served:
        # Of a fleet that sleeps, or catches up as a whole; its first request has to wake it.
        return request.accepts(versions.committed)
    return any(request.accepts(version) for version in versions.served)
