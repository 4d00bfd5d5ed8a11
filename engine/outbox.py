"""Where outputs go: to a callback in its own event loop, or to a store that `get_result` reads.

A step wakes each event loop once, whatever number of requests it serves.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

from engine.errors import DuplicateRequest
from engine.request import GenerationOutput

Callback = Callable[[GenerationOutput], None]

logger = logging.getLogger(__name__)


class Outbox:
    """Thread-safe. Invariants: a request has a handler or stored outputs, and at most one unread output is stored."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._handlers: dict[str, tuple[asyncio.AbstractEventLoop, Callback]] = {}
        self._stored: OrderedDict[str, GenerationOutput] = OrderedDict()
        self._is_open = False

    def open(self) -> None:
        """Readers may wait from here on."""
        with self._changed:
            self._is_open = True

    def close(self) -> None:
        """No more outputs will come: waiting readers return what is there, or None."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def register(self, request_id: str, callback: Callback, loop: asyncio.AbstractEventLoop) -> None:
        """Sends the outputs of a request to `callback`, run in `loop`, until its terminal one.

        Raises DuplicateRequest when the id has a handler: its request would else never hear of its end.
        """
        with self._changed:
            if request_id in self._handlers:
                raise DuplicateRequest(f"request id {request_id!r} has a result handler already; choose another")
            self._handlers[request_id] = (loop, callback)

    def forget(self, request_id: str) -> None:
        """Drops the handler of a request that was refused or whose waiter is gone."""
        with self._changed:
            self._handlers.pop(request_id, None)

    def deliver(self, outputs: list[GenerationOutput]) -> list[str]:
        """Hands the outputs of one step over; gives the ids whose event loop is closed: nobody reads them."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callback, GenerationOutput]]] = {}
        has_stored = False
        with self._changed:
            for output in outputs:
                handler = self._handlers.get(output.request_id)
                if handler is None:
                    self._store(output)
                    has_stored = True
                    continue
                by_loop.setdefault(handler[0], []).append((handler[1], output))
                if output.is_finished():
                    del self._handlers[output.request_id]
            if has_stored:
                self._changed.notify_all()
        orphans = []
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:
                orphans += [output.request_id for _, output in calls]
        for request_id in orphans:
            logger.warning("event loop of a result handler is closed request_id=%s", request_id)
            self.forget(request_id)
        return orphans

    def take(self, request_id: str | None, timeout_s: float | None) -> GenerationOutput | None:
        """Waits for an output, of one request or of any; None after the timeout, or once closed and empty."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while True:
                if request_id is None and self._stored:
                    return self._stored.popitem(last=False)[1]
                if request_id is not None and request_id in self._stored:
                    return self._stored.pop(request_id)
                remaining = None if deadline is None else deadline - monotonic()
                if not self._is_open or (remaining is not None and remaining <= 0):
                    return None
                self._changed.wait(remaining)

    def _store(self, output: GenerationOutput) -> None:
        unread = self._stored.get(output.request_id)
        if unread is not None:
            output.new_tokens = unread.new_tokens + output.new_tokens
            output.new_logprobs = unread.new_logprobs + output.new_logprobs
            output.new_top_logprobs = unread.new_top_logprobs + output.new_top_logprobs
        self._stored[output.request_id] = output


def _call_all(calls: list[tuple[Callback, GenerationOutput]]) -> None:
    for callback, output in calls:
        try:
            callback(output)
        except Exception:
            logger.exception("a result handler raised request_id=%s", output.request_id)
