"""The token events of a request that waits for its turn before it is sent."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.router.admission import Admission, Turn
from serve_app.router.resuming_stream import ResumingStream
from serve_app.router.version_gate import VersionGate


class AdmittedEvents:
    """Opens the stream of a request when its weights have come, and then its turn; its time counts from its arrival."""

    def __init__(
        self,
        admission: Admission,
        request: GenerateRequest,
        open_stream: Callable[[GenerateRequest], ResumingStream],
        *,
        gate: VersionGate,
    ) -> None:
        self._gate = gate
        self._admission = admission
        self._request = request
        self._open_stream = open_stream
        self._turn: Turn | None = None
        self._stream: ResumingStream | None = None
        self._is_closed = False

    async def __anext__(self) -> TokenEvent:
        """Gives the next event; before the first one raises what refuses the request."""
        if self._stream is None:
            request = await self._gate.enter(self._request)
            turn = self._turn = await self._admission.enter(request)
            if self._is_closed:
                turn.leave()
                raise StopAsyncIteration
            left_s = turn.deadline - asyncio.get_running_loop().time()
            self._stream = self._open_stream(replace(request, timeout_s=max(0.0, left_s)))
        event = await anext(self._stream)
        if self._turn is not None:
            self._turn.begin()
        return event

    @property
    def has_moved(self) -> bool:
        """A replica that had it was lost, or handed it over."""
        return self._stream is not None and self._stream.has_moved

    def close(self) -> None:
        self._is_closed = True
        if self._turn is not None:
            self._turn.leave()
        if self._stream is not None:
            self._stream.close()

    async def end_sequence(self, sequence_id: str) -> None:
        """Ends one output whose others go on."""
        assert self._stream is not None, "an output that has ended was sent"
        await self._stream.end_sequence(sequence_id)
