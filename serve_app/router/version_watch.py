"""Which weight versions the fleet serves, asked of the controller once for all who want to know."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass

from serve_app.messages import FleetStatus

LOOK_INTERVAL_S = 0.1
"""Between two questions to the controller, however many requests wait; a wait of seconds does not feel it."""
OUT_OF_SERVICE = frozenset({"loading", "drained", "lagging", "unhealthy"})
"""States of a replica that gets no requests."""


@dataclass(frozen=True, slots=True)
class FleetVersions:
    """The committed version, and those that replicas in service generate with."""

    committed: int
    served: frozenset[int]


class VersionWatch:
    """Asks at most ten times a second. For one event loop."""

    def __init__(self, status: Callable[[], Awaitable[FleetStatus]]) -> None:
        self._status = status
        self._looking: asyncio.Task[FleetVersions] | None = None
        self._looked_at = float("-inf")

    async def look(self) -> FleetVersions:
        """Gives what is served, as of now or of a question under way. Raises what the controller raises."""
        if self._looking is None or self._looking.done():
            # In an empty context, because Ray Serve ends calls made for a request together with it.
            self._looking = asyncio.get_running_loop().create_task(self._look(), context=Context())
        return await asyncio.shield(self._looking)

    async def _look(self) -> FleetVersions:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._looked_at + LOOK_INTERVAL_S - clock())
        self._looked_at = clock()
        status = await self._status()
        served = frozenset(report.version for report in status.replicas if report.state not in OUT_OF_SERVICE)
        return FleetVersions(status.committed.version, served)
