"""A request that minds its weight version: asked again while the replica it met does not serve that version."""

import asyncio
import math

from engine import FinishReason, PitstopError, WeightVersionGone
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.router.fleet import Fleet
from serve_app.router.version_gate import not_in_time
from serve_app.router.version_watch import FleetVersions

ROUTING_LAG_S = 2.0
"""What the routing policy knows of a replica is up to half a second old; on a busy machine more."""
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.2
"""The wait until it knows more doubles between these."""


class VersionedStream:
    """The token events of one request, as a HandleStream gives them.

    A replica may have other weights than routing thought. It then refuses before the first token, and the request is
    opened anew: until a replica takes it, until `wait_s` or the time of the request are over, or until it is certain
    that none will.
    """

    def __init__(self, fleet: Fleet, request: GenerateRequest, *, wait_s: float, asked_at: float | None = None) -> None:
        """Has to be called in the event loop that reads it; asked_at: when the request came, where not just now."""
        self._fleet = fleet
        self._request = request
        self._opened_at = asyncio.get_running_loop().time()
        self._asked_at = self._opened_at if asked_at is None else asked_at
        self._deadline = self._asked_at + (math.inf if request.timeout_s is None else request.timeout_s)
        self._wait_s = max(0.0, min(wait_s, self._deadline - self._opened_at))
        self._refused_at: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._is_begun = False
        self._stream = fleet.generate(request, asked_at=asked_at)

    async def __anext__(self) -> TokenEvent:
        """Gives the next event. Raises WeightVersionUnavailable and WeightVersionGone before the first one.

        Later a pinned request whose version goes ends with the engine's finish reason, after the tokens it has.
        """
        while not self._is_begun:
            event = await self._first_event()
            if event is not None:
                self._is_begun = True
                return event
            # Of several samples of a prompt some may not have been told yet.
            self._stream.close()
            await self._wait()
            self._stream = self._fleet.generate(self._request, asked_at=self._asked_at)
        return await anext(self._stream)

    def close(self) -> None:
        self._stream.close()

    def interrupt(self, error: PitstopError) -> None:
        """Has the reader get this error; while it waits for a version the next look will do it."""
        self._stream.interrupt(error)

    async def _first_event(self) -> TokenEvent | None:
        """Gives None where the replica has other weights, or got them before it drew a token."""
        try:
            event = await anext(self._stream)
        except (WeightVersionUnavailable, WeightVersionGone):
            return None
        is_gone = all(
            each.finish_reason == FinishReason.WEIGHT_VERSION_GONE and not each.token_ids
            for each in (event, *event.more)
        )
        return None if is_gone else event

    async def _wait(self) -> None:
        """Waits until a replica serves what the request accepts; raises when none does in time, a pin at once."""
        clock = asyncio.get_running_loop().time
        # A request may have waited long in a replica's queue before that replica's weights changed.
        self._refused_at = self._refused_at or clock()
        while True:
            versions = await self._fleet.versions()
            is_served = any(self._request.accepts(version) for version in versions.served)
            wait_s = self._wait_s if self._request.weight_version is None else 0.0
            give_up_at = self._opened_at + wait_s
            if is_served:
                give_up_at = max(give_up_at, self._refused_at + ROUTING_LAG_S)
            if clock() >= min(give_up_at, self._deadline):
                raise self._refusal(versions)
            if is_served:
                # Routing has not heard of that replica yet.
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
                return

    def _refusal(self, versions: FleetVersions) -> PitstopError:
        request = self._request
        pin, least, latest = request.weight_version, request.min_weight_version, request.resume_version
        if pin is not None:
            return WeightVersionGone(
                f"weight_version is {pin}, which no replica serves; the committed weight version is"
                f" {versions.committed}, ask for that one or leave the choice open",
                "weight_version",
            )
        if latest is not None:
            return WeightVersionUnavailable(
                f"the answer so far is of weight version {latest}, which no replica serves any more; the committed"
                f" weight version is {versions.committed}, ask again for an answer of that one"
            )
        return not_in_time(least, versions, wait_s=self._wait_s)
