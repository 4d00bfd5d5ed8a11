"""The application for code without an event loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from engine import PitstopError, SamplingParams, WorkloadHints
from serve_app.client.completion import Completion
from serve_app.client.options import SwapHow, SwapKeywords
from serve_app.client.pitstop import LEASE_S, MAX_CONCURRENT, Pitstop
from serve_app.client.swap import SyncSwap, TensorObject
from serve_app.client.transport import GROUP_TIMEOUT_S
from serve_app.messages import FleetStatus, PauseLease, RollbackRequest, SwapRequest, SwapResult, TokenEvent
from serve_app.resume_point import ResumePoint
from serve_app.router.service import Prompt

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0
"""For what is under way to end when the client is closed; a request that is given up is cancelled in a moment."""


class SyncPitstop:
    """The same application without an event loop; usable from several threads. Close it, or use it in a `with`."""

    def __init__(self, pitstop: Pitstop) -> None:
        self._pitstop = pitstop
        self._is_closed = False
        # So that nothing is begun that nobody ends any more.
        self._closing = threading.Lock()
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pitstop-client", daemon=True)
        self._thread.start()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        hints: WorkloadHints | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str | None = None,
        structured: Mapping[str, Any] | None = None,
        min_weight_version: int | None = None,
        weight_version: int | None = None,
        resume: ResumePoint | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[TokenEvent]:
        """Gives token events as `Pitstop.generate` does; leaving the loop ends the request in the engine."""
        events = self._pitstop.generate(
            prompt,
            sampling,
            hints,
            stop=stop,
            cache_salt=cache_salt,
            structured=structured,
            min_weight_version=min_weight_version,
            weight_version=weight_version,
            resume=resume,
            timeout_s=timeout_s,
        )
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            # Closing the client has ended it otherwise.
            if not self._is_closed:
                self._wait(events.aclose())

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        structured: Mapping[str, Any] | None = None,
        min_weight_version: int | None = None,
        weight_version: int | None = None,
        max_concurrent: int = MAX_CONCURRENT,
    ) -> list[Completion | PitstopError]:
        batch = self._pitstop.generate_batch(
            prompts,
            sampling,
            stop=stop,
            structured=structured,
            min_weight_version=min_weight_version,
            weight_version=weight_version,
            max_concurrent=max_concurrent,
        )
        return self._wait(batch)

    def swap(
        self,
        *,
        lease_s: float = LEASE_S,
        transport: str = "object_store",
        backend: str | None = None,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        **options: Unpack[SwapKeywords],
    ) -> SyncSwap:
        """Gives a swap session as `Pitstop.swap` does: `with pitstop.swap() as swap: swap.put(named_tensors)`."""
        swap = self._pitstop.swap(
            lease_s=lease_s, transport=transport, backend=backend, group_timeout_s=group_timeout_s, **options
        )
        return SyncSwap(swap, self._wait)

    def swap_weights(self, source: str | TensorObject, **options: Unpack[SwapKeywords]) -> SwapResult:
        return self._wait(self._pitstop.swap_weights(source, **options))

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> FleetStatus:
        return self._wait(self._pitstop.wait_for_version(version, timeout_s=timeout_s))

    def rollback(self, version: int | None = None, **options: Unpack[SwapHow]) -> SwapResult:
        return self._wait(self._pitstop.rollback(version, **options))

    def submit_swap(self, request: SwapRequest | RollbackRequest) -> SwapResult:
        return self._wait(self._pitstop.submit_swap(request))

    def pause(self, *, lease_s: float, in_flight: str = "keep") -> PauseLease:
        return self._wait(self._pitstop.pause(lease_s=lease_s, in_flight=in_flight))

    def renew_pause(self, lease_id: str, *, lease_s: float | None = None) -> PauseLease:
        return self._wait(self._pitstop.renew_pause(lease_id, lease_s=lease_s))

    def resume(self, lease_id: str | None = None) -> list[str]:
        return self._wait(self._pitstop.resume(lease_id))

    def status(self) -> FleetStatus:
        return self._wait(self._pitstop.status())

    def tokenize(self, prompt: Prompt) -> list[int]:
        return self._wait(self._pitstop.tokenize(prompt))

    def close(self) -> None:
        """Ends the thread, and with it what other threads wait for; the application runs on."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for work in list(self._pending):
            work.cancel()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises RuntimeError where the client is closed, also meanwhile."""
        with self._closing:
            if self._is_closed:
                work.close()
                raise RuntimeError("the client is closed; make another")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._pending.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the client was closed while this was waited for") from None
        finally:
            self._pending.discard(future)


async def _end_tasks() -> None:
    """Cancels all that this event loop does, and closes the streams that are open in it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _next(events: AsyncGenerator[TokenEvent, None]) -> TokenEvent | None:
    return await anext(events, None)
