"""An event loop whose clock jumps to the next timer: hours of deadlines pass at once, in one order for one seed.

Work for threads is carried out by the loop itself, some virtual time later. A loop in which nothing will ever happen
again raises, so what waits for ever is found at once.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
PASS_S = 1e-8
"""Of one pass, above the resolution of a clock: who looks a moment too early looks again, and not for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, *, thread_delay: Callable[[], float] = lambda: 0.0) -> None:
        self._now = 0.0
        self.thread_delay = thread_delay
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            # Cancelled is as killed: what had not begun does not happen.
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is for the caller
                future.set_exception(error)

        self.call_later(self.thread_delay(), work)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.run_until_complete(work)

    def end(self) -> None:
        """Cancels whatever goes on, and closes the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        self._loop.jump(PASS_S)
        if not events and timeout is None:
            raise RuntimeError("nothing will ever happen any more, and somebody waits")
        if not events and timeout is not None and timeout > 0:
            # A little more, as a timer that fires early would find nothing to do, again and again.
            self._loop.jump(timeout + 1e-6)
        return events
