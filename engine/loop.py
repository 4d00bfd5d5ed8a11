"""The generation loop: drain the inbox, plan, launch, commit, publish; parked while paused, with nothing in flight.

At a depth of two a step is planned and launched while the one before it runs, and that one is committed and published
while the new one runs.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter
from typing import Protocol

from engine.active_request import ActiveRequest
from engine.errors import DuplicateRequest, EngineDead, EngineStopped, NotFinished, QueueFull, WeightsError
from engine.metrics import EngineStats
from engine.outbox import Outbox
from engine.patience import Patience
from engine.plan import StepHandle, StepPlan, StepRunner
from engine.request import FinishReason, RequestStatus
from engine.scheduler import Scheduler
from engine.step_budget import StepBudget

PAUSE_WARNING_S = 60.0
PHASES = ("plan", "launch", "wait", "commit", "publish")
"""Of a step, in the order in which it goes through them."""
HANG_S = 120.0
"""A step that runs longer than this counts as hung; the longest honest step is bounded by the step budget."""

logger = logging.getLogger(__name__)


class Runner(StepRunner, Protocol):
    """What the loop needs of the model."""

    def park(self) -> None: ...

    def unpark(self) -> None: ...

    def close(self) -> None: ...


class StopMode(Enum):
    """FLUSH finishes what was submitted, HARD ends it now with what it has."""

    FLUSH = "flush"
    HARD = "hard"


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(slots=True)
class _Flight:
    """A step in flight; `started` is when its planning began. Without a handle its launch has failed."""

    plan: StepPlan
    started: float
    handle: StepHandle | None = None


@dataclass(slots=True, eq=False)
class Hold:
    """Lets requests that have begun finish before a pause, and nobody of their kind begin until it is over.

    is_for_all: all requests, else those with a pinned weight version. is_settled: nobody is left that has begun.
    wants_pause: the pause is to begin then. is_clear: it has begun.
    """

    is_for_all: bool
    is_settled: bool = False
    wants_pause: bool = False
    is_clear: bool = False


class GenerationLoop:
    """The state that the loop's thread and its callers share. Everything below `_wake` is guarded by it.

    The scheduler belongs to the loop's thread, and to holders of a pause while it is parked.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        outbox: Outbox,
        budget: StepBudget,
        depth: int,
    ) -> None:
        """depth: how many steps are in flight at most, 1 or 2."""
        self._depth = depth
        self._in_flight: deque[_Flight] = deque()
        self._scheduler = scheduler
        self._runner = runner
        self._outbox = outbox
        self._budget = budget
        self._wake = threading.Condition()
        self._inbox: list[ActiveRequest | _Cancel] = []
        self._active_ids: set[str] = set()
        self._families: dict[str, set[str]] = {}
        """By the id of a parent of children, itself and them, as long as one of them is active."""
        self._num_in_inbox = 0
        self._num_pauses = 0
        self._holds: list[Hold] = []
        self._has_new_holds = False
        """They are others than those that the scheduler knows."""
        self._is_parked = False
        self._stop: StopMode | None = None
        self._is_running = False
        self._step_started: float | None = None
        self._last_landing = 0.0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._last_step_s = 0.0
        self._paused_seconds = 0.0
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._num_swaps = 0
        self.fatal_error: BaseException | None = None
        self._failure: BaseException | None = None
        self._stats = scheduler.stats()

    # Called from any thread.

    @property
    def is_running(self) -> bool:
        return self._is_running

    @property
    def is_stopping(self) -> bool:
        """It was asked to stop, and may have ended by now."""
        return self._stop is not None

    @property
    def is_generating(self) -> bool:
        """Requests ran in the last step; as long as it is parked, nobody does."""
        return self._stats.num_running > 0 and not self._is_parked

    @property
    def num_waiting(self) -> int:
        """Requests that no step has taken up yet."""
        return self._num_in_inbox + self._stats.num_waiting

    def submit(self, requests: Sequence[ActiveRequest], *, max_waiting: int = 0) -> None:
        """Posts checked requests of one family, with their children: one that begins, or those of it that are resumed.

        Raises DuplicateRequest, QueueFull when `max_waiting` (0: any number) wait already, and EngineStopped or
        EngineDead when no step will take it.
        """
        with self._wake:
            self._raise_if_closed()
            family = {each.request_id for request in requests for each in (request, *request.children)}
            name = requests[0].family
            for request_id in {name} | family:
                # A parent's id stays taken until its last child has ended: cancelling it cancels them.
                if request_id in self._active_ids or request_id in self._families:
                    raise DuplicateRequest(f"request id {request_id!r} is in flight; choose another", "request_id")
            waiting = self.num_waiting
            if max_waiting and waiting >= max_waiting:
                raise QueueFull(
                    f"{waiting} requests wait, and max_queue_size is {max_waiting}; try again later", waiting
                )
            self._active_ids |= family
            if family != {name}:
                self._families[name] = family
            self._inbox += requests
            self._num_in_inbox += len(family)
            self._wake.notify_all()

    def cancel(self, request_id: str, *, alone: bool = False) -> None:
        """Ends a request by the end of the step in progress, its children too unless `alone`; ignores unknown ids."""
        with self._wake:
            itself = {request_id} & self._active_ids
            members = itself if alone else self._families.get(request_id, itself)
            self._inbox += [_Cancel(member) for member in members]
            self._wake.notify_all()

    def stop(self, mode: StopMode) -> None:
        """Asks the thread to end; a later HARD overrides an earlier FLUSH."""
        with self._wake:
            if self._stop is not StopMode.HARD:
                self._stop = mode
            self._has_new_holds = True
            self._wake.notify_all()

    def stats(self) -> EngineStats:
        """The numbers as of the end of the last step."""
        return replace(
            self._stats,
            num_waiting=self.num_waiting,
            is_paused=self._is_parked and self._num_pauses > 0,
            paused_seconds_total=self._paused_seconds,
            is_alive=self._is_running and self.fatal_error is None,
        )

    def cached_prefixes(self, limit: int) -> list[bytes]:
        """Gives the names of cached prefixes, newest first."""
        return self._scheduler.prefixes.newest(limit)

    def check_health(self) -> None:
        """Raises EngineDead when the loop ended on an error or hangs in a step."""
        if self.fatal_error is not None:
            raise EngineDead(f"the generation loop ended: {self.fatal_error}") from self.fatal_error
        started = self._step_started
        if started is not None and perf_counter() - started > HANG_S:
            raise EngineDead(f"a step has been running for {perf_counter() - started:.0f} s")

    def acquire_pause(
        self, timeout_s: float | None = None, *, hold: Hold | None = None, patience: Patience | None = None
    ) -> None:
        """Returns once the loop is parked between two steps; with a hold, when who has begun has finished as well.

        Raises EngineStopped when it does not run or ends meanwhile, and WeightsError after `timeout_s` and at the end
        of `patience`; then nothing is held any more.
        """
        patience = patience or Patience()
        with self._wake:
            patience.begin(self._wake)
            if not self.is_running:
                raise EngineStopped("pause() needs a running manager; call start() first")
            if hold is None:
                self._num_pauses += 1
                self._wake.notify_all()
            else:
                hold.wants_pause = True
                self._put_hold(hold)
            in_time = self._wake.wait_for(
                lambda: self._is_parked_for(hold) or self._is_over_for(hold) or patience.is_over, timeout_s
            )
            if self._is_parked_for(hold):
                return
            is_over = self._is_over_for(hold)
            self.release_pause(hold=hold)
        if in_time and not is_over:
            raise WeightsError("the wait for a pause was given up before it had begun, so nothing was changed")
        if in_time:
            raise EngineStopped("the manager stopped before it could pause")
        raise _lateness(hold, timeout_s)

    def settle(self, hold: Hold, timeout_s: float | None = None, *, patience: Patience | None = None) -> None:
        """Returns once who has begun has finished; the loop goes on, and nobody of the kind begins.

        That lasts until `release_pause`; `acquire_pause` with the same hold then waits for one step. Raises as it does.
        """
        patience = patience or Patience()
        with self._wake:
            patience.begin(self._wake)
            if not self.is_running:
                raise EngineStopped("settle() needs a running manager; call start() first")
            self._put_hold(hold)
            self._wake.wait_for(lambda: hold.is_settled or self._is_over_for(hold) or patience.is_over, timeout_s)
            is_over = self._is_over_for(hold)
            if hold.is_settled and not is_over:
                return
            self.release_pause(hold=hold)
        if is_over:
            raise EngineStopped("the manager stopped before its requests had finished")
        if patience.is_over:
            raise WeightsError("the wait for requests to finish was given up, so nothing was changed")
        raise _lateness(hold, timeout_s)

    def release_pause(self, *, hold: Hold | None = None) -> None:
        """Gives a pause back; the loop goes on when the last one is. hold: the one that it was acquired with."""
        with self._wake:
            if hold is not None:
                self._holds.remove(hold)
                self._has_new_holds = True
            self._num_pauses -= hold is None or hold.is_clear
            if self._num_pauses == 0:
                # Here, not in the loop's thread: who pauses again at once then waits until a step could be made.
                self._is_parked = False
            self._wake.notify_all()

    def change_version(self, version: int, *, in_flight: str) -> None:
        """Starts a weight version; the caller holds a pause, or the thread has not started. Requests that are pinned to
        another version end.
        """
        with self._wake:
            assert self._is_parked or not self._is_running, "the weight version changes only while the loop is parked"
            requests = self._scheduler.requests()
            ended = self._end_pinned_to_others(requests, version)
            if in_flight == "abort":
                rest = [request for request in requests if not request.status.is_terminal]
                ended += self._end(rest, FinishReason.CANCELLED, "weights changed")
            self._publish(ended)
            self._scheduler.set_version(version, recompute=in_flight == "recompute")
            self._num_swaps += 1
            self._refresh_stats()

    def fail(self, error: BaseException) -> None:
        """Ends the loop on an error instead of its next step; the caller holds a pause."""
        with self._wake:
            self._failure = error

    # The loop's own thread.

    def mark_started(self) -> None:
        """Opens the loop for callers; `run` follows in the loop's thread."""
        self._stop = None
        self.fatal_error = None
        self._is_running = True
        self._outbox.open()

    def run(self) -> None:
        """Generates until stopped. Whatever happens, every request gets its terminal output."""
        try:
            while self._wait_for_work():
                self._step()
            self._drain()
        except BaseException as error:  # the only way out that is not a stop: the device is broken, or we have a bug
            logger.exception("generation loop ended")
            self.fatal_error = error
        finally:
            self._end_all()

    def _wait_for_work(self) -> bool:
        """Takes the inbox in, parks while paused; gives False when it is time to end."""
        while True:
            self._apply_holds()
            if self._num_pauses > 0:
                self._drain()
            with self._wake:
                if self._num_pauses > 0 and not self._in_flight:
                    self._park()
                    self._apply_holds()
                    if self._failure is not None:
                        raise self._failure
                posted, self._inbox = self._inbox, []
                num_posted = self._num_in_inbox
                stop = self._stop
            self._take_in(posted, num_posted)
            if stop is StopMode.HARD:
                return False
            if self._scheduler.has_requests or self._in_flight:
                return True
            with self._wake:
                if self._inbox or self._num_pauses > 0 or self._has_new_holds or self._stop is StopMode.HARD:
                    continue
                if self._stop is StopMode.FLUSH:
                    return False
                self._wake.wait()

    def _put_hold(self, hold: Hold) -> None:
        if hold not in self._holds:
            self._holds.append(hold)
        self._has_new_holds = True
        if self._is_parked:  # as the thread would when it goes on: the caller may be who holds it
            self._apply_holds()
        self._wake.notify_all()

    def _is_parked_for(self, hold: Hold | None) -> bool:
        return self._is_running and self._is_parked and (hold is None or hold.is_clear)

    def _is_over_for(self, hold: Hold | None) -> bool:
        return not self._is_running or (hold is not None and not hold.is_clear and self._stop is not None)

    def _apply_holds(self) -> None:
        """Tells the scheduler whom to hold back, and begins the pauses for which nothing is left to finish."""
        if not self._holds and not self._has_new_holds:
            return
        with self._wake:
            self._has_new_holds = False
            # Who stops the manager wants what was submitted to be finished, the requests that are held back too.
            holds = self._holds if self._stop is None else []
            self._scheduler.hold_back(
                everybody=any(hold.is_for_all for hold in holds), pinned=any(not hold.is_for_all for hold in holds)
            )
            for hold in holds:
                if hold.is_clear or self._scheduler.has_begun(only_pinned=not hold.is_for_all):
                    continue
                if hold.wants_pause:
                    hold.is_clear = True
                    self._num_pauses += 1
                if not hold.is_settled:
                    hold.is_settled = True
                    self._wake.notify_all()

    def _park(self) -> None:
        started = perf_counter()
        self._runner.park()
        self._is_parked = True
        self._wake.notify_all()
        while not self._wake.wait_for(lambda: not self._is_parked, timeout=PAUSE_WARNING_S):
            logger.warning("generation is still paused paused_s=%.0f", perf_counter() - started)
        self._runner.unpark()
        self._paused_seconds += perf_counter() - started

    def _take_in(self, posted: list[ActiveRequest | _Cancel], num_posted: int) -> None:
        ended = []
        for item in posted:
            if isinstance(item, ActiveRequest):
                family = [item, *item.children]
                self._scheduler.add(item)
                # The version may have changed since the request was checked.
                ended += self._end_pinned_to_others(family, self._scheduler.version)
            else:
                request = self._scheduler.end(item.request_id, FinishReason.CANCELLED, perf_counter())
                ended += [request] if request is not None else []
        if posted:
            with self._wake:  # or they would for a moment be counted twice, or not at all
                self._num_in_inbox -= num_posted
                self._refresh_stats()
        self._publish(ended)

    def _end_pinned_to_others(self, requests: list[ActiveRequest], version: int) -> list[ActiveRequest]:
        """Ends those that are pinned to another version than this one, and gives them."""
        gone = [request for request in requests if request.pinned_version not in (None, version)]
        return self._end(gone, FinishReason.WEIGHT_VERSION_GONE, f"weight version {version} is served now")

    def _end(self, requests: list[ActiveRequest], reason: FinishReason, error: str) -> list[ActiveRequest]:
        for request in requests:
            self._scheduler.end(request.request_id, reason, perf_counter(), error=error)
        return requests

    def _step(self) -> None:
        """Launches the next step where there is one, and takes in the oldest where the next has to wait for it."""
        is_launched = self._launch()
        if not is_launched or len(self._in_flight) == self._depth:
            self._land()

    def _launch(self) -> bool:
        if self._in_flight and self._scheduler.must_drain:
            return False
        started = perf_counter()
        plan = self._scheduler.plan(self._budget.max_tokens(), started)
        planned = self._end_phase("plan", started)
        if not plan.rows:
            assert self._in_flight, "requests are active, but none can be scheduled"
            return False
        self._step_started = self._step_started or started
        # In the books before anything can go wrong: what the plan holds has to be given back.
        self._in_flight.append(_Flight(plan, started))
        self._in_flight[-1].handle = self._runner.launch(plan)
        self._end_phase("launch", planned)
        return True

    def _land(self) -> None:
        flight = self._in_flight[0]
        assert flight.handle is not None
        waiting_since = perf_counter()
        samples = flight.handle.wait()
        self._in_flight.popleft()
        now = self._end_phase("wait", waiting_since)
        told = self._scheduler.commit(flight.plan, samples, now)
        committed = self._end_phase("commit", now)
        # A step that was launched early has run since the one before it ended.
        self._last_step_s = now - max(flight.started, self._last_landing)
        self._last_landing = now
        self._step_started = now if self._in_flight else None
        self._budget.observe(flight.plan, self._last_step_s)
        self._num_steps += 1
        self._step_seconds += self._last_step_s
        self._refresh_stats()
        self._publish(told)
        self._end_phase("publish", committed)

    def _end_phase(self, phase: str, began: float) -> float:
        """Books the time since `began` and gives the present, at which the next phase begins."""
        now = perf_counter()
        self._phase_seconds[phase] += now - began
        return now

    def _drain(self) -> None:
        while self._in_flight:
            self._land()

    def _publish(self, requests: list[ActiveRequest]) -> None:
        outputs = [request.take_output() for request in requests if request.streaming or request.status.is_terminal]
        with self._wake:
            for request in requests:
                if request.status.is_terminal:
                    self._forget(request)
        for request_id in self._outbox.deliver(outputs):
            self.cancel(request_id)

    def _forget(self, request: ActiveRequest) -> None:
        self._active_ids.remove(request.request_id)
        family = self._families.get(request.family)
        if family is not None:
            family.remove(request.request_id)
            if not family:
                del self._families[request.family]

    def _refresh_stats(self) -> None:
        cost = self._budget.times.cost
        self._stats = replace(
            self._scheduler.stats(),
            prefill_tokens_per_s=self._budget.prefill_tokens_per_s,
            decode_tokens_per_s=self._budget.decode_tokens_per_s,
            fixed_step_s=cost.fixed_s,
            request_step_s=cost.request_s,
            token_step_s=cost.token_s,
            max_step_tokens=self._budget.max_tokens(),
            last_step_s=self._last_step_s,
            steps_total=self._num_steps,
            step_seconds_total=self._step_seconds,
            step_phase_seconds_total=dict(self._phase_seconds),
            weight_swaps_total=self._num_swaps,
        )

    def _end_all(self) -> None:
        reason = f"the generation loop ended: {self.fatal_error}" if self.fatal_error else "the manager was stopped"
        with self._wake:
            posted, self._inbox = self._inbox, []
            self._num_in_inbox = 0
            self._step_started = None
        try:
            for item in posted:
                if isinstance(item, ActiveRequest):
                    self._scheduler.add(item)
            ended = self._scheduler.requests()
            for request in ended:
                self._end_surely(request, reason)
            self._abandon_flights()
            self._refresh_stats()
            self._publish(ended)
            self._runner.close()
        finally:
            with self._wake:
                self._is_running = False
                self._wake.notify_all()
            self._outbox.close()

    def _abandon_flights(self) -> None:
        """Frees what the steps hold that an error left in flight; their requests have ended."""
        while self._in_flight:
            plan = self._in_flight.popleft().plan
            try:
                self._scheduler.commit(plan, {}, perf_counter())
            except Exception:
                logger.exception("books are wrong for a step in flight")

    def _end_surely(self, request: ActiveRequest, reason: str) -> None:
        """Ends a request even where an error has left the scheduler's books wrong."""
        try:
            self._scheduler.end(request.request_id, FinishReason.FAILED, perf_counter(), error=reason)
        except Exception:
            logger.exception("books are wrong for a request request_id=%s", request.request_id)
            request.status, request.finish_reason, request.error = RequestStatus.FAILED, FinishReason.FAILED, reason

    def _raise_if_closed(self) -> None:
        if self.fatal_error is not None:
            raise EngineDead(f"the generation loop ended: {self.fatal_error}; start() again or replace the process")
        if self._stop is not None:
            raise EngineStopped("the manager is stopping or was stopped; start() it again to submit requests")


def _lateness(hold: Hold | None, timeout_s: float | None) -> WeightsError:
    if hold is not None and not hold.is_clear:
        whom = "running" if hold.is_for_all else "running pinned"
        return NotFinished(
            f"the {whom} requests did not finish within {timeout_s:.3g} s, so nothing was changed; allow more time, or"
            " choose another in_flight or pinned"
        )
    return WeightsError(f"no step ended within {timeout_s:.3g} s, so the loop did not pause; allow more time")
