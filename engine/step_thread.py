"""A runner whose steps run in a thread of their own, so that the loop's Python runs beside them.

On a CPU the whole step is computed there, on a GPU it is launched there; what makes the launch wait for the device
does not make the loop wait.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from engine.plan import SampledToken, StepHandle, StepPlan, StepRunner


class StepThread:
    """A runner around a runner. The thread starts with the first step, and is a daemon: at exit nobody waits for it."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._orders: SimpleQueue[tuple[StepPlan, Future[StepHandle]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def launch(self, plan: StepPlan) -> StepHandle:
        """Has a step run after those launched before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pitstop-steps", daemon=True)
            self._thread.start()
        launched: Future[StepHandle] = Future()
        self._orders.put((plan, launched))
        return _QueuedStep(launched)

    def park(self) -> None:
        """The loop parks with nothing in flight, so the thread has nothing to do."""

    def unpark(self) -> None:
        """Nor is there anything to set going again."""

    def close(self) -> None:
        """Ends the thread after the steps launched so far; the next launch starts another."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # In a frame of its own, or the thread would keep the requests of its last step for as long as it idles.
        order = self._orders.get()
        if order is None:
            return False
        plan, launched = order
        try:
            launched.set_result(self._runner.launch(plan))
        except BaseException as error:  # noqa: BLE001  # the loop raises it where it waits for the step
            launched.set_exception(error)
        return True


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    launched: Future[StepHandle]

    def wait(self) -> dict[str, SampledToken]:
        return self.launched.result().wait()
