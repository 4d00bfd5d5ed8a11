"""One swap over the fleet: all replicas stage, the history decides, all commit; or all drop what they have staged."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from engine import NotFinished, PitstopError, WeightsError, WeightsInvalid
from serve_app.messages import CommittedVersion, StagedDetails, SwapOptions, SwapOrder, SwapPhase, SwapReply, SwapResult
from serve_app.protocol.errors import ManifestError, ReplicaGone, RollingFailed
from serve_app.settings import WeightSettings
from serve_app.weights.checks import check_digest
from serve_app.weights.fleet_calls import FleetCalls, raise_refusals
from serve_app.weights.history import WeightHistory, now
from serve_app.weights.replica_reports import ReplicaReports

logger = logging.getLogger("ray.serve.pitstop")

FINISH_MARGIN_S = 5.0
"""For the answer of a replica that has waited for its requests as long as it may."""

DETAILS_ATTEMPTS = 3
"""A replica that died withholds the answers of all until Ray has noticed."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the controller finds of weights by itself, where no replica runs."""

    digest: str
    num_bytes: int
    details: StagedDetails


CheckAlone = Callable[[SwapOrder], Awaitable[Checked | None]]
"""Verifies a source without a replica; None where replicas run, and so have to do it."""
Kill = Callable[[str], Awaitable[None]]
"""Ends the process of a replica, so that Serve starts another; nothing happens where it is gone."""


@dataclass(slots=True)
class _Running:
    """What is known of the swap under way. participants: those that staged. is_staged: they are all, if any."""

    order: SwapOrder
    options: SwapOptions
    started_at: float
    participants: frozenset[str] = frozenset()
    is_staged: bool = False
    has_resumed: bool = False
    staged: list[SwapReply] = field(default_factory=list)
    details: StagedDetails = field(default_factory=StagedDetails)
    phases_s: dict[str, float] = field(default_factory=dict)
    paused_s: float = 0.0
    done: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    verified: set[str] = field(default_factory=set)


class TwoPhaseSwap:
    """Brings one version after another to the fleet; its caller sees to it that they do not overlap.

    Invariants: the history changes only after every replica has staged, and in a synchronous swap after every replica
    stands still and has voted; it changes back only where it is certain that no replica has the new version. In a
    synchronous swap nobody stands still while requests of others finish, and nobody resumes before all have committed,
    but those that are silent or failed: they stay parked.
    """

    def __init__(
        self,
        settings: WeightSettings,
        history: WeightHistory,
        reports: ReplicaReports,
        *,
        calls: FleetCalls,
        check_alone: CheckAlone,
        kill: Kill,
    ) -> None:
        self._settings = settings
        self._history = history
        self._reports = reports
        self._calls = calls
        self._check_alone = check_alone
        self._kill = kill
        self._running: _Running | None = None
        self.was_rolled_back = False
        """Whether the latest swap was committed and taken back."""
        self.phase: SwapPhase = "stage"
        """What the swap under way is doing; see `FleetStatus.phase`."""

    @property
    def has_resumed(self) -> bool:
        """Whether the synchronous swap under way has had all resume; it may still be verifying."""
        return self._running is not None and self._running.has_resumed

    def holds_back(self, replica_id: str) -> bool:
        """Gives whether this replica, which takes no part, may not generate before those that do have resumed."""
        running = self._running
        if running is None or running.options.strategy == "rolling" or running.has_resumed:
            return False
        return running.is_staged and replica_id not in running.participants

    async def run(self, version: CommittedVersion, order: SwapOrder, options: SwapOptions) -> SwapResult:
        """Commits these weights on every replica, or raises with the old ones serving everywhere."""
        self.was_rolled_back = False
        self._running = running = _Running(order, options, _clock())
        try:
            return await self._run(version, running)
        finally:
            self._running = None

    async def _run(self, version: CommittedVersion, running: _Running) -> SwapResult:
        previous = self._history.newest.version
        # Before the weights are read, which takes minutes where they are large.
        await self._history.check_writable()
        logger.info("event=swap_started swap=%s version=%d", running.order.swap_id, running.order.version)
        version = await self._stage(version, running)
        if not running.participants:
            await self._decide(version, running, previous)
        elif running.options.strategy == "rolling":
            await self._roll(version, running, previous)
        else:
            await self._commit_together(version, running, previous)
        if running.options.verify and running.participants:
            await self._verify(running)
        result = self._result(running, previous)
        await self._history.keep_result(result)
        return result

    # Staging

    async def _stage(self, version: CommittedVersion, running: _Running) -> CommittedVersion:
        """Has everybody stage, and gives the version with its digest; where one refuses, all drop it."""
        try:
            with self._timed("stage", running):
                return await self._stage_everywhere(version, running)
        except PitstopError:
            await self._abort(running)
            raise

    async def _stage_everywhere(self, version: CommittedVersion, running: _Running) -> CommittedVersion:
        order = running.order
        replies = await self._calls.ask_everyone("stage", order, timeout_s=self._settings.stage_timeout_s)
        # Also with none running: those that start while the controller looks at the weights would begin with the old.
        running.is_staged = True
        if not replies:
            return await self._stage_alone(version, running)
        running.staged = [replies[name] for name in sorted(replies)]
        running.participants = frozenset(replies)
        digest = _common_digest(running.staged)
        running.details = await self._details(running)
        return await self._history.keep_details(replace(version, digest=digest), running.details)

    async def _stage_alone(self, version: CommittedVersion, running: _Running) -> CommittedVersion:
        checked = await self._check_alone(running.order)
        if checked is None:
            raise ReplicaGone("no replica answers yet, so no weights were loaded; try again when the fleet is ready")
        if checked.digest:
            check_digest(checked.digest, running.order)
        running.details = checked.details
        running.staged = [SwapReply("", 0, ok=True, digest=checked.digest, num_bytes=checked.num_bytes)]
        return await self._history.keep_details(replace(version, digest=checked.digest), checked.details)

    async def _details(self, running: _Running) -> StagedDetails:
        order, name = running.order, running.staged[0].replica_id
        wanted = replace(order, targets=frozenset((name,)))
        for _ in range(DETAILS_ATTEMPTS):
            for answer in await self._calls.tell("details", wanted, timeout_s=self._settings.commit_timeout_s):
                if isinstance(answer, StagedDetails):
                    return answer
            # One that is silent withholds the answers of all; one that is slow has another attempt.
            if silent := sorted(running.participants - self._reports.names()):
                raise ReplicaGone(f"replica {silent[0]} staged the weights but is silent since; try again")
        raise ReplicaGone(f"replica {name} staged the weights but did not say what they are; try again")

    # Synchronous

    async def _commit_together(self, version: CommittedVersion, running: _Running, previous: int) -> None:
        order, names = running.order, running.participants
        timeout_s = order.finish_timeout_s + FINISH_MARGIN_S
        try:
            if "finish" in (order.in_flight, order.pinned):
                # Before anybody parks: else all would stand still for as long as one of them has to finish.
                with self._timed("finish", running):
                    await self._ask_all("finish", running, timeout_s=timeout_s)
            parked_at = _clock()
            with self._timed("park", running):
                await self._ask_all("park", running, timeout_s=timeout_s)
            with self._timed("vote", running):
                await self._ask_all("vote", running, timeout_s=self._settings.commit_timeout_s)
        except PitstopError:
            await self._abort(running)
            raise
        await self._decide(version, running, previous)
        with self._timed("commit", running):
            replies = await self._calls.ask("commit", order, names, timeout_s=self._settings.commit_timeout_s)
        if len(replies) == len(names) and not any(reply.ok for reply in replies.values()):
            await self._take_back(running, replies)
        self._note(running, replies)
        with self._timed("resume", running):
            done = frozenset(running.done)
            replies = await self._calls.ask("resume", order, done, timeout_s=self._settings.commit_timeout_s)
        running.has_resumed = True
        running.paused_s = max((reply.paused_s for reply in replies.values()), default=_clock() - parked_at)

    async def _ask_all(self, phase: str, running: _Running, *, timeout_s: float) -> None:
        """Raises the first refusal, and ReplicaGone where a replica does not answer."""
        names = running.participants
        replies = await self._calls.ask(phase, running.order, names, timeout_s=timeout_s)
        raise_refusals(replies.values())
        if missing := sorted(names - replies.keys()):
            raise ReplicaGone(f"replica {missing[0]} staged the weights but did not {phase}; try again")

    async def _take_back(self, running: _Running, replies: dict[str, SwapReply]) -> None:
        """Raises the first refusal, with the version before committed again.

        Returns only where that could not be made durable: then the decision stands, and the replicas catch up.
        """
        try:
            await self._history.take_back(running.order.version)
        except ManifestError as error:
            logger.warning("event=decision_stands version=%d error=%r", running.order.version, str(error))
            return
        self.was_rolled_back = True
        await self._abort(running)
        raise_refusals(replies.values())

    # Rolling

    async def _roll(self, version: CommittedVersion, running: _Running, previous: int) -> None:
        await self._decide(version, running, previous)
        names, size = sorted(running.participants), running.options.max_paused
        with self._timed("commit", running):
            for start in range(0, len(names), size):
                await self._roll_over(frozenset(names[start : start + size]), running)

    async def _roll_over(self, names: frozenset[str], running: _Running) -> None:
        """Commits on these replicas, having led new requests away from them where others can take them."""
        order = replace(running.order, targets=names)
        commit_s = self._settings.commit_timeout_s
        if names != running.participants:
            await self._calls.ask("drain", order, names, timeout_s=commit_s)
            await asyncio.sleep(self._settings.drain_s)
        timeout_s = order.finish_timeout_s + commit_s
        replies = await self._calls.ask("commit", order, names, timeout_s=timeout_s)
        self._note(running, replies)
        running.paused_s = max((running.paused_s, *(reply.paused_s for reply in replies.values())))
        for name in sorted(names - running.done):
            reason = replies[name].error if name in replies else "it does not answer"
            is_late = name in replies and replies[name].error_type == NotFinished.__name__
            if is_late and running.options.on_failure == "continue":
                # It works, and goes on without new work until it has finished; who never does is replaced as any other
                # that stays behind.
                continue
            if running.options.on_failure == "rollback":
                raise RollingFailed(f"replica {name}: {reason}")
            await self._replace(name, running, str(reason))

    # Both

    async def _decide(self, version: CommittedVersion, running: _Running, previous: int) -> None:
        """Commits in the history; where that fails, tells all to drop what they staged, and raises."""
        result = self._result(running, previous)
        try:
            await self._history.commit(replace(version, committed_at=now(), result=result))
        except WeightsError:
            await self._abort(running)
            raise

    def _note(self, running: _Running, replies: dict[str, SwapReply]) -> None:
        for name, reply in replies.items():
            if reply.ok:
                running.done.add(name)
                self._reports.note_commit(reply, running.order)

    async def _verify(self, running: _Running) -> None:
        """Has every replica read its weights back; one that has others than were staged is replaced."""
        with self._timed("verify", running):
            replies = await self._calls.ask(
                "verify", running.order, frozenset(running.done), timeout_s=self._settings.stage_timeout_s
            )
        running.verified = {name for name, reply in replies.items() if reply.ok}
        for name, reply in replies.items():
            if not reply.ok and reply.error_type == WeightsInvalid.__name__:
                running.done.discard(name)
                await self._replace(name, running, str(reply.error))

    async def _replace(self, name: str, running: _Running, reason: str) -> None:
        logger.error("event=replica_replaced replica=%s swap=%s reason=%r", name, running.order.swap_id, reason)
        running.replaced.add(name)
        await self._kill(name)
        self._reports.forget(name)

    async def _abort(self, running: _Running) -> None:
        self.phase = "abort"
        # Replicas that do not hear it drop their staged weights, and resume, at their next heartbeat.
        names = running.participants | self._reports.names()
        await self._calls.ask("abort", running.order, names, timeout_s=self._settings.commit_timeout_s)

    @contextmanager
    def _timed(self, phase: SwapPhase, running: _Running) -> Iterator[None]:
        self.phase = phase
        began = _clock()
        try:
            yield
        finally:
            running.phases_s[phase] = round(_clock() - began, 4)

    def _result(self, running: _Running, previous: int) -> SwapResult:
        done: Set[str] = running.done
        expected = (running.participants | self._reports.names()) if done else running.participants
        return SwapResult(
            version=running.order.version,
            previous_version=previous,
            replicas=sorted(done),
            staged_s=running.phases_s["stage"],
            paused_s=round(running.paused_s, 4),
            total_s=round(_clock() - running.started_at, 4),
            swap_id=running.order.swap_id,
            lagging=sorted(expected - done - running.replaced),
            strategy=running.options.strategy,
            digest=running.staged[0].digest,
            num_bytes=max(reply.num_bytes for reply in running.staged),
            is_streamed=any(reply.is_streamed for reply in running.staged),
            unchanged=running.details.unchanged,
            phases_s=dict(running.phases_s),
            verified=sorted(running.verified),
            replaced=sorted(running.replaced),
        )


def _common_digest(replies: list[SwapReply]) -> str:
    """Gives the digest that all have staged; raises WeightsInvalid where two have read different weights."""
    first = replies[0]
    for other in replies:
        if other.digest != first.digest:
            raise WeightsInvalid(
                f"replicas {first.replica_id} and {other.replica_id} read different weights from the same source "
                f"(digests {first.digest} and {other.digest}); let nobody write to it, and have all see the same files"
            )
    return first.digest


def _clock() -> float:
    return asyncio.get_running_loop().time()
