"""A trainer's side of a swap: tensors go out in buckets, and leaving the `async with` brings them to every replica.

async with pitstop.swap(label="step 7") as swap:
    await swap.put(model.named_parameters())
print(swap.result.version)
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from engine import InvalidRequest, PitstopError
from serve_app.client.transport import (
    GroupOptions,
    ObjectStoreTransport,
    ProcessGroupTransport,
    Transport,
    retrieve,
)
from serve_app.messages import SessionRequest, SessionState, SwapResult
from serve_app.protocol.errors import NoReplica, ReplicaLost, SwapSessionGone
from serve_app.protocol.parsing import shorten
from serve_app.router.handle_stream import call
from serve_app.weights.tensor_pieces import NamedTensors, TensorPiece, cut_buckets

RENEWALS_PER_LEASE = 4

TensorObject = Mapping[str, Tensor] | ObjectRef[Any] | Sequence[ObjectRef[Any]]
"""A state dict, or references to one or to parts of one in Ray's object store."""


class Swap:
    """One swap session, for one task. `result` is there once the `async with` was left without an exception.

    While it is open its lease is renewed in the background; leaving it by an exception aborts it, and the old weights
    go on serving.
    """

    def __init__(
        self,
        controller: DeploymentHandle[Any],
        request: SessionRequest,
        *,
        timeout_s: float,
        group: GroupOptions | None = None,
    ) -> None:
        """`group` sends over a process group instead of Ray's object store."""
        # By reference, as Ray frees a bucket only where Serve hands it on as Ray's own argument.
        self._controller: Any = controller.options(_by_reference=True)
        self._request = request
        self._timeout_s = timeout_s
        self._sequence = 0
        self._bucket_bytes = 0
        self._objects = ObjectStoreTransport(self._ask)
        self._transport: Transport = self._objects if group is None else ProcessGroupTransport(self._ask, group)
        self._sending: asyncio.Future[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._result: SwapResult | None = None

    @property
    def result(self) -> SwapResult:
        """What became of the swap. Raises RuntimeError before its end."""
        if self._result is None:
            raise RuntimeError("the swap has no result before its `with` was left, nor where that raised")
        return self._result

    async def __aenter__(self) -> Self:
        self._result = (await self._open(self._request)).result
        if self._result is not None:
            return self
        self._renewing = asyncio.get_running_loop().create_task(self._renew())
        try:
            self._bucket_bytes = await self._transport.start()
        except BaseException:
            await self._end()
            raise
        return self

    async def put(self, named_tensors: NamedTensors) -> None:
        """Sends tensors: a dict, or pairs of name and tensor, in any number of calls.

        They may change once this has returned. Tensors of a GPU are copied to the CPU, one at a time. Raises
        InvalidRequest for what is no dense tensor, WeightsError for a full store, SwapSessionGone for an ended session.
        """
        for bucket in self.cut(named_tensors):
            await self.send(bucket)
        await self.flush()

    async def put_objects(self, objects: TensorObject) -> None:
        """Sends a state dict, or what references in Ray's object store refer to: state dicts, or parts of one."""
        if isinstance(objects, Mapping):
            await self.put(objects)
            return
        references: list[Any] = list(objects) if isinstance(objects, Iterable) else [objects]
        if not references or not all(isinstance(reference, ObjectRef) for reference in references):
            raise InvalidRequest(
                f"the weights are {shorten(objects) if references else 'none'}; give a folder, a dict of tensors, or"
                " references",
                "source",
            )
        for reference in references:
            await self.flush()
            if self._result is None:
                self._sending = asyncio.ensure_future(self._objects.send_reference(self._next(), reference))
        await self.flush()

    def cut(self, named_tensors: NamedTensors) -> Iterable[list[TensorPiece]]:
        """Gives the tensors as buckets for `send`; runs where it is iterated."""
        return cut_buckets(named_tensors, bucket_bytes=self._bucket_bytes) if self._result is None else ()

    async def send(self, bucket: list[TensorPiece]) -> None:
        """Sends one bucket; it is on its way while the one before is still written."""
        written = await self._transport.prepare(bucket)
        await self.flush()
        self._sending = asyncio.ensure_future(written(self._next()))

    async def flush(self) -> None:
        """Waits until everything sent is written."""
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._result is not None:
            return
        try:
            if error is None:
                await self.flush()
                self._result = await self._commit()
        finally:
            await self._end()

    async def _end(self) -> None:
        """Stops whatever goes on here, and aborts the session unless it has brought a result."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait((self._sending,))
            retrieve(self._sending)
        if self._result is None:
            # What keeps it from being aborted has ended it, or its lease will.
            with suppress(PitstopError):
                await self._ask("abort_session")
        self._transport.close()

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    async def _commit(self) -> SwapResult:
        try:
            result: SwapResult = await self._ask("commit_session")
            return result
        except SwapSessionGone as error:
            if (known := await self._outcome()) is not None:
                return known
            raise SwapSessionGone(f"nothing was committed: {error}") from error

    async def _outcome(self) -> SwapResult | None:
        """Gives what the key has brought, from a controller that may have been restarted after it was committed."""
        again = SessionRequest(self._request.session_id + "-again", self._request.swap, self._request.lease_s)
        state = await self._open(again)
        if state.result is None:
            await self._call(self._controller.abort_session.remote(again.session_id))
        return state.result

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._request.lease_s / RENEWALS_PER_LEASE)
            # A session that is gone says so to the next `put`.
            with suppress(PitstopError):
                await self._ask("renew_session")

    async def _open(self, request: SessionRequest) -> SessionState:
        state: SessionState = await self._call(self._controller.open_session.remote(request))
        return state

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self._call(getattr(self._controller, method).remote(self._request.session_id, *arguments))

    async def _call(self, response: Any) -> Any:
        try:
            return await call(response, timeout_s=self._timeout_s, whom="the weight controller")
        except (ReplicaLost, NoReplica) as error:
            raise SwapSessionGone(f"the weight controller was lost during the swap ({error}); swap again") from error


class SyncSwap:
    """The same for code without an event loop: `with pitstop.swap() as swap: swap.put(tensors)`."""

    def __init__(self, swap: Swap, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._swap = swap
        self._wait = wait

    @property
    def result(self) -> SwapResult:
        return self._swap.result

    def put(self, named_tensors: NamedTensors) -> None:
        """Sends tensors, as `Swap.put`; an iterator runs in the thread of the caller."""
        for bucket in self._swap.cut(named_tensors):
            self._wait(self._swap.send(bucket))
        self._wait(self._swap.flush())

    def __enter__(self) -> Self:
        self._wait(self._swap.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(self._swap.__aexit__(kind, error, trace))
