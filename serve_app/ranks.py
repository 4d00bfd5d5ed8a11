"""The engine of a replica, and the other ranks of one whose model is cut: Ray actors on its node that end with it.

Rank 0 is the replica itself. Serve places a replica and its ranks together, in one placement group, and Ray kills the
actors of a replica that is gone, however it went.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayTaskError

from engine import (
    ContinuousBatchingManager,
    EngineDead,
    RankPlace,
    init_continuous_batching,
    join_ranks,
    load_model,
    open_meeting,
)
from serve_app.settings import AppSettings

logger = logging.getLogger("ray.serve.pitstop")

T = TypeVar("T")


def start_engine(
    settings: AppSettings, path: str, place: RankPlace | None = None, meeting: socket.socket | None = None
) -> ContinuousBatchingManager:
    """Loads the model, or at a rank's place its part of it, and gives the engine that runs it. Blocks.

    meeting: at rank 0 the socket that it meets the others at.
    """
    torch.set_num_threads(settings.replicas.threads())
    if place is not None:
        join_ranks(place, meeting=meeting, device=settings.device, timeout_s=settings.engine.cpu_group_timeout)
    model = load_model(
        path,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        tensor_parallel_size=settings.replicas.tensor_parallel_size,
    )
    manager = init_continuous_batching(
        model, continuous_batching_config=settings.engine_config, workload_hints=settings.workload_hints
    )
    manager.start()
    return manager


class RankWorker:
    """A rank that is not the driver: a Ray actor, busy for as long as the engine lasts."""

    def arrive(self) -> None:
        """Answers as soon as this process has started."""

    def follow(self, settings: AppSettings, path: str, place: RankPlace) -> None:
        """Computes what the driver orders until it stops; raises when this rank cannot go on."""
        manager = start_engine(settings, path, place)
        manager.join(perf_counter())
        manager.check_health()


class RankCrew:
    """Ranks 1 to n - 1 of this replica. Made, and used, in one event loop; they start at once, as does rank 0.

    Invariant: none of them outlives the replica, and a replica that has lost one serves no more.
    """

    def __init__(self, settings: AppSettings, path: str) -> None:
        replicas = settings.replicas
        size = replicas.tensor_parallel_size
        self.meeting = open_meeting()
        port = self.meeting.getsockname()[1]
        self.place = RankPlace(0, size, port)
        worker: Any = ray.remote(num_cpus=replicas.num_cpus, num_gpus=replicas.num_gpus)(RankWorker)
        self._actors = [worker.remote() for _ in range(1, size)]
        self._arrivals = [actor.arrive.remote() for actor in self._actors]
        calls = [
            actor.follow.remote(settings, path, RankPlace(rank, size, port))
            for rank, actor in enumerate(self._actors, start=1)
        ]
        loop = asyncio.get_running_loop()
        self._ends = [loop.create_task(_end_of(call, rank)) for rank, call in enumerate(calls, start=1)]
        self._is_released = False

    async def arrive(self) -> None:
        """Returns when all ranks have started: a process takes seconds to, for which nobody should wait in a group."""
        await self.unless_lost(asyncio.gather(*map(_result, self._arrivals)))

    async def unless_lost(self, work: Awaitable[T]) -> T:
        """Gives the result of `work`; raises EngineDead, with the reason, when a rank ends before it."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, *self._ends}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        # It waits for a rank that will never come, and is left to the end of the process.
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise EngineDead(next(end.result() for end in self._ends if end.done()))

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Calls `on_loss` with the reason when a rank ends before `release`."""

        def ended(end: asyncio.Task[str]) -> None:
            if not self._is_released:
                on_loss(end.result())

        for end in self._ends:
            end.add_done_callback(ended)

    def release(self) -> None:
        """From here on ranks may end: the engine is about to stop them."""
        self._is_released = True

    def end(self) -> None:
        """Kills the ranks that have not ended."""
        for actor in self._actors:
            ray.kill(actor)


async def _result(call: Any) -> None:
    # An object reference is awaitable but no coroutine, which gather wants.
    await call


async def _end_of(call: Any, rank: int) -> str:
    try:
        await call
    except Exception as error:  # noqa: BLE001  # whatever Ray, torch or transformers raised there is told by name
        cause: Any = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
        return f"rank {rank} ended: {type(cause).__name__}: {cause}"
    return f"rank {rank} ended"
