"""A replica as a member of the fleet: tells the controller how it is, and does what it hears. No Ray in here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass

from serve_app.messages import CommittedWeights, ReplicaReport
from serve_app.weights.follower import WeightFollower
from serve_app.weights.leased_pauses import LeasedPauses

logger = logging.getLogger("ray.serve.pitstop")

JOIN_TIMEOUT_S = 60.0
"""A replica and the controller start at the same time; this is for the slower machine to start one process."""
ANSWER_TIMEOUT_S = 15.0
"""Above the time a restarted controller takes to collect reports before it answers."""
CONFIRM_INTERVAL_S = 0.5
"""Between two looks of a replica that waits to begin."""


@dataclass(frozen=True, slots=True)
class ControllerCalls:
    """The controller as a replica calls it; each may fail in any way while the controller is away."""

    heartbeat: Callable[[ReplicaReport], Awaitable[CommittedWeights]]
    committed: Callable[[], Awaitable[CommittedWeights]]
    digests: Callable[[int], Awaitable[Mapping[str, str]]]
    start_failed: Callable[[str], Awaitable[None]]
    number: Callable[[], Awaitable[int]]


class CannotJoin(RuntimeError):
    """A new replica cannot serve what is committed."""


class FleetMember:
    """Keeps a follower and its pauses in step with the controller. One event loop only."""

    def __init__(
        self,
        follower: WeightFollower,
        pauses: LeasedPauses,
        *,
        controller: ControllerCalls,
        report: Callable[[], Awaitable[ReplicaReport]],
    ) -> None:
        self._follower = follower
        self._pauses = pauses
        self._controller = controller
        self._report = report
        self.number: int | None = None
        """Which replica it is, from the time it has joined: see `ReplicaNumbers`."""
        self._catching_up: asyncio.Task[bool] | None = None
        self._confirmation: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Brings a new replica to the committed version; raises CannotJoin, so that it never gets ready."""
        await self._reach_committed()
        self.number = await asyncio.wait_for(self._controller.number(), ANSWER_TIMEOUT_S)

    async def _reach_committed(self) -> None:
        while True:
            committed = await asyncio.wait_for(self._controller.committed(), JOIN_TIMEOUT_S)
            if self._follower.version >= committed.version:
                return
            if not await self._follower.catch_up(committed, digests_of=self._controller.digests):
                reason = f"weight version {committed.version} cannot be loaded: {self._follower.error}"
                # So that the status says it; this replica will not report.
                await asyncio.wait_for(self._controller.start_failed(reason), ANSWER_TIMEOUT_S)
                raise CannotJoin(reason)

    async def confirm(self) -> None:
        """Lets the first requests wait for one more look: a swap may have begun or ended while the replica started."""
        if self._confirmation is None:
            self._confirmation = asyncio.get_running_loop().create_task(self._confirm(), context=Context())
        await asyncio.shield(self._confirmation)

    async def beat(self) -> CommittedWeights:
        """Reports once and does what the answer asks for; what takes long goes on beside."""
        seen = self._follower.num_changes
        report = await self._report()
        committed = await asyncio.wait_for(self._controller.heartbeat(report), ANSWER_TIMEOUT_S)
        await self._follower.settle(committed, seen=seen)
        # Who was held back for a swap and now is behind catches up before it generates; else two versions would.
        ended = () if self._follower.is_lagging else committed.ended_pauses
        self._pauses.hear(committed.pauses, ended)
        if self._follower.is_lagging and (self._catching_up is None or self._catching_up.done()):
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up(committed))
        return committed

    async def caught_up(self) -> None:
        """Waits for the end of what a beat has begun beside itself, whether it succeeded or not."""
        if self._catching_up is not None:
            await self._catching_up

    async def _confirm(self) -> None:
        """Looks until the controller answers, as it did a moment ago; one that stays away must not stop a replica."""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                while not await self._is_in_step():  # noqa: ASYNC110  # nobody can tell when the controller is back
                    await asyncio.sleep(CONFIRM_INTERVAL_S)
        except TimeoutError:
            logger.warning("event=confirm_failed timeout_s=%g", JOIN_TIMEOUT_S)

    async def _is_in_step(self) -> bool:
        try:
            await self.beat()
        except Exception as error:  # noqa: BLE001
            # Ray raises many kinds while the controller is away.
            logger.info("event=confirm_retried error=%r", str(error))
            return False
        await self.caught_up()
        await self._pauses.follow()
        return not self._follower.is_lagging

    async def _catch_up(self, committed: CommittedWeights) -> bool:
        return await self._follower.catch_up(committed, digests_of=self._controller.digests)
