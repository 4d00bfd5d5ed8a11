"""The token events of one request, whatever becomes of the replicas they come from."""

import asyncio
import logging
from dataclasses import replace
from typing import Protocol

from engine import DuplicateRequest, EngineDead, EngineStopped, FinishReason, PitstopError, QueueFull, WeightVersionGone
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.metrics import Recorder
from serve_app.protocol.errors import (
    PoisonRequest,
    ReplicaDraining,
    ReplicaLost,
    ReplicaSilent,
    WeightVersionUnavailable,
)
from serve_app.router.fleet import Fleet
from serve_app.router.fleet_watch import FleetWatch
from serve_app.router.progress import Progress
from serve_app.router.versioned_stream import VersionedStream
from serve_app.routing import signals as routing_signals
from serve_app.settings import AppSettings

logger = logging.getLogger("ray.serve.pitstop")

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0
"""The wait before another attempt doubles between these while no token comes; the first one is made at once."""
NUM_DEATHS_ALONE = 2
"""After so many deaths of replicas that answered it a request is tried alone; one more, and it is poison."""
REASONS: dict[type[PitstopError], str] = {
    ReplicaLost: "lost",
    EngineDead: "engine_dead",
    ReplicaSilent: "silent",
    ReplicaDraining: "draining",
    EngineStopped: "draining",
    WeightVersionUnavailable: "version_gone",
    QueueFull: "queue_full",
    DuplicateRequest: "duplicate",
}
"""Why a request goes on elsewhere, as the metric says it."""
DEATHS = ("lost", "engine_dead")
"""Those of which a request may be the cause. A silent replica may only be slow, and it is not dead."""
WAITS = ("draining", "queue_full")
"""Those that are nobody's fault; they are tried again for as long as the request may take."""


class ResumeMeter:
    """Counts what is resumed. For one event loop."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        for reason in sorted(set(REASONS.values())):
            # From zero, so that the first one is a rise.
            recorder.count("pitstop_resumes_total", reason, amount=0)
        recorder.count("pitstop_poison_requests_total", amount=0)

    def count(self, reason: str) -> None:
        self._recorder.count("pitstop_resumes_total", reason)

    def count_poison(self) -> None:
        self._recorder.count("pitstop_poison_requests_total")

    def observe_gap(self, seconds: float) -> None:
        """Takes the time from the loss of a replica to the next event of the stream."""
        self._recorder.observe("pitstop_resume_seconds", value=seconds)


class Attempt(Protocol):
    """The events of one request from one replica."""

    async def __anext__(self) -> TokenEvent: ...

    def close(self) -> None: ...

    def interrupt(self, error: PitstopError) -> None:
        """Has the reader get this error at once."""
        ...


class ResumingStream:
    """Opens a request at a replica, and what is left of it at another one where that dies, falls silent or drains.

    The reader sees one stream. It needs a fixed seed in the request; greedy and seeded outputs are then exact. One
    event loop, one reader.
    """

    def __init__(
        self, fleet: Fleet, request: GenerateRequest, *, settings: AppSettings, watch: FleetWatch, meter: ResumeMeter
    ) -> None:
        """Has to be called in the event loop that reads it."""
        assert request.sampling.seed is not None
        self._fleet = fleet
        self._settings = settings
        self._watch = watch
        self._meter = meter
        self._clock = asyncio.get_running_loop().time
        self.progress = Progress(request)
        self._request = request
        self._opened_at = self.heard_at = self._clock()
        self._replica_id: str | None = None
        self._excluded: frozenset[str] = frozenset()
        self._num_attempts = self._num_failures = 0
        self.num_deaths = 0
        self._lost_at: float | None = None
        self._is_closed = False
        limits = settings.limits
        self._stream = self._open(request, wait_s=min(limits.version_wait_s, limits.request_timeout_s))
        watch.follow(self)

    async def __anext__(self) -> TokenEvent:
        """Gives the next event; raises errors of the project only, and those of lost replicas as a last resort."""
        while True:
            try:
                event = await anext(self._stream)
            except WeightVersionGone:
                if not self.progress.has_begun:
                    raise
                # Pinned, and gone while it was on its way to another replica: it ends with what it has.
                return self.progress.ending(FinishReason.WEIGHT_VERSION_GONE)
            except PitstopError as error:
                await self._move(error)
                continue
            self.heard_at = self._clock()
            self._replica_id = event.replica_id
            if self._lost_at is not None:
                self._meter.observe_gap(self.heard_at - self._lost_at)
                self._lost_at = None
            return self.progress.take(event)

    def close(self) -> None:
        self._is_closed = True
        self._watch.unfollow(self)
        routing_signals.forget_place(self._request.request_id)
        self._stream.close()

    async def end_sequence(self, sequence_id: str) -> None:
        """Ends one output whose others go on."""
        await self._fleet.end_sequence(self.progress.end(sequence_id))

    @property
    def has_moved(self) -> bool:
        """A replica that had it was lost, or handed it over."""
        return self._num_attempts > 0

    @property
    def place(self) -> str | None:
        """The replica that answers, or to which the request was sent."""
        return self._replica_id or routing_signals.place_of(self._request.request_id)

    def interrupt(self, error: PitstopError) -> None:
        """Has the reader go on elsewhere."""
        self._stream.interrupt(error)

    def _open(self, request: GenerateRequest, *, wait_s: float) -> Attempt:
        if (request.min_weight_version, request.weight_version, request.resume_version) == (None, None, None):
            return self._fleet.generate(request, asked_at=self._opened_at)
        return VersionedStream(self._fleet, request, wait_s=wait_s, asked_at=self._opened_at)

    async def _move(self, error: PitstopError) -> None:
        """Opens what is left elsewhere; raises the error where that is not to be."""
        reason = next((REASONS[kind] for kind in type(error).__mro__ if kind in REASONS), None)
        place = self.place
        self._stream.close()
        routing_signals.forget_place(self._request.request_id)
        # Before its first attempt has been taken anywhere a refusal is one.
        is_refusal = self._num_attempts == 0 and not self.progress.has_begun and reason not in (*DEATHS, "silent")
        if reason is None or self._is_closed or (is_refusal and reason != "draining"):
            raise error
        if reason == "version_gone" and self._settings.resume.on_version_gone != "continue":
            raise error
        self._note_failure(reason, error)
        self._meter.count(reason)
        self._lost_at = self._lost_at or self._clock()
        if place is not None and reason != "version_gone":
            self._excluded |= {place}
        logger.info(
            "event=request_resumed reason=%s replica=%s tokens=%d deaths=%d",
            reason,
            place,
            self.progress.num_tokens,
            self.num_deaths,
        )
        if self._num_failures > 1 or reason in WAITS:
            await asyncio.sleep(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** max(0, self._num_failures - 1)))
        if self._is_closed:
            raise error
        self._reopen(reason)

    def _note_failure(self, reason: str, error: PitstopError) -> None:
        """Raises where it was tried often enough."""
        self._num_failures = 1 if self.progress.num_new_tokens else self._num_failures + 1
        if reason in DEATHS:
            self.num_deaths += 1
        if self.num_deaths > NUM_DEATHS_ALONE:
            self._meter.count_poison()
            logger.error("event=request_poison request=%s deaths=%d", self._request.request_id, self.num_deaths)
            raise PoisonRequest(
                f"{self.num_deaths} replicas died while they answered this request, the last one with no other on it;"
                " it is not tried again, do not send it again either: the log of the replicas says what it does to them"
            ) from error
        if self._num_failures > self._settings.resume.max_attempts and reason not in WAITS:
            raise error

    def _reopen(self, reason: str) -> None:
        self._num_attempts += 1
        request = self.progress.rest(self._num_attempts, elapsed_s=self._clock() - self._opened_at)
        if reason == "version_gone":
            request = replace(request, resume_version=None)
        self._request = replace(request, excluded=self._excluded, is_alone=self.num_deaths >= NUM_DEATHS_ALONE)
        self._replica_id, self.heard_at = None, self._clock()
        resume = self._settings.resume
        self._stream = self._open(
            self._request, wait_s=resume.version_wait_s if resume.on_version_gone == "wait" else 0.0
        )
