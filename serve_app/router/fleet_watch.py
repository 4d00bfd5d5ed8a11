"""Tells open streams that their replica is going away or has fallen silent, so that they go on elsewhere.

Ray Serve takes a replica that it stops out of every router's candidates at once, and then lets it finish what it has;
that is the sign to hand its streams over. Of a process that stands still (stopped, swapped out, stuck) it takes a
minute or more to notice; the controller hears heartbeats, so that their absence shows it within seconds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Protocol

from engine import PitstopError
from serve_app.messages import FleetStatus
from serve_app.protocol.errors import ReplicaDraining, ReplicaSilent
from serve_app.routing import signals as routing_signals

logger = logging.getLogger("ray.serve.pitstop")

LOOK_INTERVAL_S = 0.1
"""Between two looks at the candidates, which are in this process."""
STATUS_INTERVAL_S = 0.5
"""Between two questions to the controller, while streams are open; replicas report once a second."""


DEATH_NOTICE_S = 3.0
"""A replica that is no candidate any more may be dead instead, and then its streams end within this time by themselves:
so that they know it for a death. One that gives tokens after ALIVE_AFTER_S is alive, and hands its streams over."""
ALIVE_AFTER_S = 0.3


class Followed(Protocol):
    """An open stream."""

    @property
    def place(self) -> str | None:
        """The replica it comes from, as far as it is known."""
        ...

    @property
    def heard_at(self) -> float:
        """When its latest event came or it was opened, by the clock of the event loop."""
        ...

    def interrupt(self, error: PitstopError) -> None:
        """Has whoever reads it go on elsewhere."""
        ...


class FleetWatch:
    """Looks as long as a stream is followed. For one event loop; it starts with the first stream."""

    def __init__(self, status: Callable[[], Awaitable[FleetStatus]], *, silent_after_s: float) -> None:
        """silent_after_s: without a heartbeat a replica counts as silent, and without an event its stream."""
        self._status = status
        self._silent_after_s = silent_after_s
        self._streams: set[Followed] = set()
        self._task: asyncio.Task[None] | None = None
        self._silent: set[str] = set()
        self._heartbeats: dict[str, float] = {}
        """When the latest one of each replica came, as far as the controller has told."""
        self._known: set[str] = set()
        """Every replica that was a candidate; one that never was has not left."""
        self._left_at: dict[str, float] = {}

    def follow(self, stream: Followed) -> None:
        self._streams.add(stream)
        if self._task is None or self._task.done():
            # In an empty context, because Ray Serve ends calls made for a request together with it.
            self._task = asyncio.get_running_loop().create_task(self._watch(), context=Context())

    def unfollow(self, stream: Followed) -> None:
        self._streams.discard(stream)

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        asking: asyncio.Task[None] | None = None
        asked_at = float("-inf")
        while self._streams:
            if (asking is None or asking.done()) and clock() >= asked_at + STATUS_INTERVAL_S:
                # Beside, as the controller may be slow and candidates change meanwhile.
                asked_at = clock()
                asking = asyncio.ensure_future(self._ask())
            try:
                self._look(clock())
            except Exception:
                logger.exception("event=fleet_watch_failed")
            await asyncio.sleep(LOOK_INTERVAL_S)
        if asking is not None:
            asking.cancel()

    def _look(self, now: float) -> None:
        candidates = routing_signals.candidates()
        self._known |= candidates
        if self._silent:
            self._silent &= candidates
            routing_signals.avoid(self._silent)
        for stream in list(self._streams):
            place = stream.place
            if place is None:
                continue
            if place in self._silent and now - stream.heard_at > self._silent_after_s:
                stream.interrupt(ReplicaSilent(f"replica {place} has fallen silent"))
            # With nobody else there it may as well stay: the replica finishes what it has.
            elif candidates and place in self._known and place not in candidates:
                left_at = self._left_at.setdefault(place, now)
                if stream.heard_at > left_at + ALIVE_AFTER_S or now > left_at + DEATH_NOTICE_S:
                    stream.interrupt(ReplicaDraining(f"replica {place} is going away"))
        self._left_at = {name: at for name, at in self._left_at.items() if name in self._known - candidates}
        self._known &= candidates | {stream.place for stream in self._streams if stream.place is not None}

    async def _ask(self) -> None:
        try:
            reports = (await self._status()).replicas
        except PitstopError:
            # Without the controller nobody knows; what was silent stays so until it is heard or gone.
            return
        now = asyncio.get_running_loop().time()
        candidates = routing_signals.candidates()
        # The controller forgets who is silent for long, so what was heard is kept here.
        heard = {name: at for name, at in self._heartbeats.items() if name in candidates}
        heard |= {report.replica_id: now - report.age_s for report in reports}
        silent = {name for name, at in heard.items() if now - at > self._silent_after_s}
        for name in silent - self._silent:
            logger.warning("event=replica_silent replica=%s heartbeat_age_s=%.1f", name, now - heard[name])
        self._heartbeats, self._silent = heard, silent
        routing_signals.avoid(silent)
