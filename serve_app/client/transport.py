"""How a bucket gets from a trainer to the controller: through Ray's object store, or over a process group."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from engine import InvalidRequest
from serve_app.weights.collective import TRAINER, Meeting, PairGroup, check_backend, open_store, pack
from serve_app.weights.tensor_pieces import TensorPiece

TRANSPORTS = ("object_store", "torch_distributed")
Written = Callable[[int], Awaitable[None]]
"""Takes a bucket's number and waits until it is written."""
MAX_BUCKET_BYTES = 128 * 2**20
"""Larger ones are no faster, and two are in the object store at once."""
STORE_SHARE = 8
"""Of a node's object store a bucket takes at most this part: the store also holds what others put there."""
GROUP_TIMEOUT_S = 30.0
"""For the other side of a process group to meet, and to take a bucket: a hundredfold of what a slow network needs."""
GRACE_S = 2.0
"""For the controller to say why, once the group has failed."""

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the controller for this session; raises errors of the project only."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """A process group of torch.distributed. Raises InvalidRequest for a backend that is not there."""

    backend: str = "gloo"
    timeout_s: float = GROUP_TIMEOUT_S

    def __post_init__(self) -> None:
        check_backend(self.backend)
        if not 1 <= self.timeout_s <= 3600:
            raise InvalidRequest(f"group_timeout_s is {self.timeout_s}; it must be 1 to 3600", "group_timeout_s")


def group_options(transport: str, *, backend: str | None, timeout_s: float) -> GroupOptions | None:
    """Gives the process group that a transport needs, or None; raises InvalidRequest for what does not go together."""
    if transport not in TRANSPORTS:
        raise InvalidRequest(f"transport is {transport!r}; it must be one of {', '.join(TRANSPORTS)}", "transport")
    if transport == "torch_distributed":
        return GroupOptions(backend or "gloo", timeout_s)
    if backend is not None:
        raise InvalidRequest(f"backend is {backend!r}, which belongs to transport 'torch_distributed'", "backend")
    return None


class Transport(Protocol):
    """Carries buckets, one after the other."""

    async def start(self) -> int:
        """Gets ready, once the session is open; gives how many bytes a bucket may have."""

    async def prepare(self, bucket: list[TensorPiece]) -> Written:
        """Takes a bucket, whose tensors may change from then on, and gives what sends it."""

    def close(self) -> None:
        """Ends whatever `start` began."""


class ObjectStoreTransport:
    """Puts each bucket into Ray's object store; the controller writes it from there without another copy."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def start(self) -> int:
        """Gives what fits the smallest object store of the cluster several times."""
        nodes: Any = await asyncio.to_thread(ray.nodes)
        stores = [node["Resources"].get("object_store_memory", 0) for node in nodes if node["Alive"]]
        smallest = min((int(size) for size in stores if size), default=STORE_SHARE * MAX_BUCKET_BYTES)
        return max(1, min(MAX_BUCKET_BYTES, smallest // STORE_SHARE))

    async def prepare(self, bucket: list[TensorPiece]) -> Written:
        reference = await asyncio.to_thread(ray.put, bucket)
        return lambda sequence: self.send_reference(sequence, reference)

    async def send_reference(self, sequence: int, reference: "ray.ObjectRef[Any]") -> None:
        """Has the controller write what a reference refers to; holds it, and so the object, until that is done."""
        # In a list, or Serve would resolve it.
        box = [reference]
        await self._ask("put_bucket", sequence, box)
        del box

    def close(self) -> None:
        """Needs nothing."""


class ProcessGroupTransport:
    """Broadcasts each bucket over a process group of the trainer's and a receiver's."""

    def __init__(self, ask: Ask, options: GroupOptions) -> None:
        self._ask = ask
        self._backend = options.backend
        self._timeout_s = options.timeout_s
        self._group: PairGroup | None = None

    async def start(self) -> int:
        """Meets the receiver, which the controller starts."""
        # First, as the group's deadline is for the network, and a process takes longer to start.
        await self._ask("start_receiver", self._backend)
        host: str = await asyncio.to_thread(ray.util.get_node_ip_address)
        any_port = Meeting(host, 0, self._backend, self._timeout_s)
        store = await asyncio.to_thread(open_store, any_port, is_master=True)
        meeting = Meeting(host, store.port, self._backend, self._timeout_s)
        joining = asyncio.ensure_future(self._ask("join_group", meeting))
        group = asyncio.ensure_future(asyncio.to_thread(PairGroup, meeting, store, TRAINER))
        await _both(joining, group)
        self._group = group.result()
        return MAX_BUCKET_BYTES

    async def prepare(self, bucket: list[TensorPiece]) -> Written:
        headers, data = await asyncio.to_thread(pack, bucket)

        async def send(sequence: int) -> None:
            assert self._group is not None
            answer = asyncio.ensure_future(self._ask("receive_bucket", sequence, headers))
            await _both(answer, asyncio.ensure_future(asyncio.to_thread(self._group.broadcast, data)))

        return send

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


async def _both(answer: "asyncio.Future[Any]", work: "asyncio.Future[Any]") -> None:
    """Waits for the controller's answer and for the group's work; of two errors the answer's is raised.

    It knows more than the group does, as that the session was aborted. Work that nobody ends goes on to its timeout.
    """
    for one in (answer, work):
        one.add_done_callback(retrieve)
    await asyncio.wait((answer, work), return_when=asyncio.FIRST_EXCEPTION)
    if not answer.done():
        await asyncio.wait((answer,), timeout=GRACE_S)
    if answer.done():
        answer.result()
    else:
        answer.cancel()
    work.result()


def retrieve(done: "asyncio.Future[Any]") -> None:
    """Takes note of an error that came second, so that it is not reported as one that nobody noticed."""
    if not done.cancelled():
        done.exception()
