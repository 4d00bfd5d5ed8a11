"""A request that minds its weight version: asked again while the replica it met does not serve that version."""

import asyncio

from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.router.fleet import Fleet

ROUTING_LAG_S = 2.0
"""What the routing policy knows of a replica is up to half a second old; on a busy machine more."""
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.2
"""The wait until it knows more doubles between these."""


class VersionedStream:
    """The token events of one request, as a HandleStream gives them.

    A replica may have other weights than routing thought. It then refuses before the first token, and the request is
    opened anew: until a replica takes it, until `wait_s` are over, or until it is certain that none will.
    """

    def __init__(self, fleet: Fleet, request: GenerateRequest, *, wait_s: float) -> None:
        """Has to be called in the event loop that reads it."""
        self._fleet = fleet
        self._request = request
        self._wait_s = wait_s
        self._asked_at = asyncio.get_running_loop().time()
        self._retry_s = FIRST_RETRY_S
        self._is_begun = False
        self._stream = fleet.generate(request)

    async def __anext__(self) -> TokenEvent:
        """Gives the next event. Raises WeightVersionUnavailable before the first one."""
        while not self._is_begun:
            try:
                event = await anext(self._stream)
            except WeightVersionUnavailable:
                await self._wait()
                self._stream = self._fleet.generate(self._request, asked_at=self._asked_at)
            else:
                self._is_begun = True
                return event
        return await anext(self._stream)

    def close(self) -> None:
        self._stream.close()

    async def _wait(self) -> None:
        """Waits until a replica serves what the request accepts; raises when none has in time."""
        clock = asyncio.get_running_loop().time
        while True:
            versions = await self._fleet.versions()
            is_served = any(self._request.accepts(version) for version in versions.served)
            wait_s = max(self._wait_s, ROUTING_LAG_S) if is_served else self._wait_s
            if clock() >= self._asked_at + wait_s:
                raise WeightVersionUnavailable(
                    f"min_weight_version is {self._request.min_weight_version} and the committed weight version is"
                    f" {versions.committed}; it did not come within {self._wait_s:g} s, ask again after the swap"
                )
            if is_served:
                # Routing has not heard of that replica yet.
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
                return
