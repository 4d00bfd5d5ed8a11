"""The Python client where the other side does not answer, or another thread closes it. No Ray."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from serve_app.client import Pitstop, SyncPitstop, pitstop, sync
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import DeadlineExceeded

DEADLINE_S = 30.0


class SilentRouter:
    """A handle whose calls are never answered."""

    def options(self, **_: object) -> "SilentRouter":
        return self

    def __getattr__(self, _: str) -> "SilentRouter":
        return self

    def remote(self, *_: object) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()


class SlowPitstop:
    """An application that answers nothing, except for the first token of a stream."""

    def __init__(self, *, is_stubborn: bool = False) -> None:
        self.is_stubborn = is_stubborn
        self.is_asked, self.is_ended = threading.Event(), threading.Event()

    async def status(self) -> None:
        self.is_asked.set()
        if self.is_stubborn:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def generate(self, *_: object, **__: object) -> AsyncGenerator[TokenEvent, None]:
        try:
            yield TokenEvent("one", [1])
            self.is_asked.set()
            await asyncio.Event().wait()
        finally:
            self.is_ended.set()


def client(slow: SlowPitstop) -> SyncPitstop:
    return SyncPitstop(cast("Pitstop", slow))


async def test_waiting_for_a_version_ends_in_time_though_the_router_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pitstop, "LOOK_S", 0.01)
    llm = Pitstop(cast("DeploymentHandle[Any]", SilentRouter()))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(DeadlineExceeded, match=r"version 2 was served within 0\.01 s: the router did not answer"):
            await llm.wait_for_version(2, timeout_s=0.01)


@pytest.mark.parametrize("max_concurrent", [0, -1])
async def test_a_batch_that_could_never_begin_is_refused(max_concurrent: int) -> None:
    llm = Pitstop(cast("DeploymentHandle[Any]", SilentRouter()))
    with pytest.raises(ValueError, match=f"max_concurrent is {max_concurrent}; it must be at least 1"):
        await llm.generate_batch(["a"], max_concurrent=max_concurrent)


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_closing_ends_what_other_threads_wait_for(monkeypatch: pytest.MonkeyPatch, is_stubborn: bool) -> None:
    if is_stubborn:
        monkeypatch.setattr(sync, "CLOSE_TIMEOUT_S", 0.01)
    slow = SlowPitstop(is_stubborn=is_stubborn)
    llm = client(slow)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(llm.status)
        assert slow.is_asked.wait(DEADLINE_S)
        llm.close()
        with pytest.raises(RuntimeError, match="closed while this was waited for"):
            waiting.result(DEADLINE_S)


def test_closing_ends_a_stream_that_another_thread_reads() -> None:
    slow = SlowPitstop()
    llm = client(slow)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(lambda: list(llm.generate("hello")))
        assert slow.is_asked.wait(DEADLINE_S)
        llm.close()
        with pytest.raises(RuntimeError, match="closed while this was waited for"):
            reading.result(DEADLINE_S)
    assert slow.is_ended.is_set()


def test_closing_ends_a_stream_that_nobody_reads_just_now_and_later_calls_are_refused() -> None:
    slow = SlowPitstop()
    llm = client(slow)
    events = llm.generate("hello")
    assert next(events).token_ids == [1]
    llm.close()
    assert slow.is_ended.is_set()
    with pytest.raises(RuntimeError, match="the client is closed"):
        next(events)
    with pytest.raises(RuntimeError, match="the client is closed"):
        llm.status()
    llm.close()
