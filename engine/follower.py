"""The loop of a rank that is not the driver: it computes what the driver orders, and parks when the driver does."""

import logging
import threading
from collections.abc import Sequence
from time import monotonic

from engine.active_request import ActiveRequest
from engine.errors import EngineDead, EngineStopped
from engine.loop import Hold, StopMode
from engine.metrics import EngineStats
from engine.parallel import RankGroup, Verb
from engine.patience import Patience
from engine.plan import StepRunner
from engine.rank_weights import RankWeights

logger = logging.getLogger(__name__)


class FollowerLoop:
    """Has no requests of its own. What is below `_wake` is guarded by it."""

    def __init__(self, *, runner: StepRunner, ranks: RankGroup, weights: RankWeights) -> None:
        self._runner = runner
        self._ranks = ranks
        self._weights = weights
        self._wake = threading.Condition()
        self._num_pauses = 0
        self._is_parked = False
        self._is_running = False
        self.fatal_error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._is_running

    def mark_started(self) -> None:
        """Opens the loop for callers; `run` follows in the loop's thread."""
        self.fatal_error = None
        self._is_running = True

    def run(self) -> None:
        """Follows the driver until it stops."""
        try:
            for order in self._ranks.orders():
                self._wait_until_left()
                if order.verb is Verb.STEP:
                    self._runner.launch(order.plan).wait()
                elif order.verb is Verb.PARK:
                    self._park()
                elif order.task is not None:
                    self._weights.obey(order.task)
        except BaseException as error:  # the group is broken, or we have a bug: `check_health` says so
            logger.exception("rank ended")
            self.fatal_error = error
        finally:
            with self._wake:
                self._is_running = False
                self._wake.notify_all()

    @property
    def is_stopping(self) -> bool:
        """A rank ends when the driver does."""
        return False

    @property
    def is_generating(self) -> bool:
        """The driver knows, and the driver stages."""
        return False

    @property
    def num_waiting(self) -> int:
        return 0

    def submit(self, requests: Sequence[ActiveRequest], *, max_waiting: int = 0) -> None:  # noqa: ARG002
        """Not called: requests enter at the driver."""
        raise EngineStopped(f"request {requests[0].request_id} was sent to a rank that is not the driver")

    def cancel(self, request_id: str, *, alone: bool = False) -> None:  # the interface of a loop
        """The driver knows the request, and the driver hears of the cancelling."""

    def stop(self, mode: StopMode) -> None:
        """A rank ends when the driver does."""

    def change_version(self, version: int, *, in_flight: str) -> None:
        """What was computed before is the driver's to forget."""

    def fail(self, error: BaseException) -> None:
        """A rank ends when the driver does."""

    def acquire_pause(
        self,
        timeout_s: float | None = None,  # noqa: ARG002
        *,
        hold: Hold | None = None,  # noqa: ARG002
        patience: Patience | None = None,  # noqa: ARG002
    ) -> None:
        """Returns once the driver has parked all ranks; raises EngineStopped when it does not in time."""
        deadline = monotonic() + self._ranks.timeout_s
        with self._wake:
            while not self._is_parked:
                if not self._is_running or not self._wake.wait(deadline - monotonic()):
                    raise EngineStopped("the driver did not pause; all ranks have to enter pause()")
            self._num_pauses += 1

    def settle(
        self,
        hold: Hold,  # noqa: ARG002
        timeout_s: float | None = None,  # noqa: ARG002
        *,
        patience: Patience | None = None,  # noqa: ARG002
    ) -> None:
        """Not called: the driver has the requests."""
        raise EngineStopped("this rank is not the driver, which has the requests")

    def release_pause(self, *, hold: Hold | None = None) -> None:  # noqa: ARG002
        """Gives a pause back; the driver goes on when every rank has left its last one."""
        with self._wake:
            self._num_pauses -= 1
            if self._num_pauses == 0:
                self._is_parked = False
                self._ranks.mark_pause_left()
            self._wake.notify_all()

    def stats(self) -> EngineStats:
        """The driver has the numbers; here only whether this rank is well."""
        return EngineStats(is_paused=self._num_pauses > 0, is_alive=self._is_running and self.fatal_error is None)

    def cached_prefixes(self, limit: int) -> list[bytes]:  # noqa: ARG002
        """The driver has the names."""
        return []

    def check_health(self) -> None:
        """Raises EngineDead when this rank has ended on an error."""
        if self.fatal_error is not None:
            raise EngineDead(f"this rank ended: {self.fatal_error}") from self.fatal_error

    def _park(self) -> None:
        with self._wake:
            self._ranks.num_parks += 1
            self._is_parked = True
            self._wake.notify_all()

    def _wait_until_left(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._num_pauses == 0)
            self._is_parked = False
