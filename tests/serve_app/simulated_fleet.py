"""A fleet without Ray, engines, tensors and time: the real controller and the real followers over a lossy transport.

Weights are named values in `folders`. An engine generates while it is alive, awake, confirmed and nobody parks it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine import InvalidRequest, NotFinished, WeightsSourceError
from serve_app.messages import CommittedWeights, ReplicaReport, StagedDetails, SwapOrder, SwapRequest, WeightSource
from serve_app.settings import WeightSettings
from serve_app.weights.fleet_member import CannotJoin, ControllerCalls, FleetMember
from serve_app.weights.fleet_weights import FleetWeights
from serve_app.weights.follower import WeightFollower
from serve_app.weights.history import WeightHistory
from serve_app.weights.leased_pauses import LeasedPauses
from serve_app.weights.two_phase_swap import Checked
from tests.serve_app.virtual_loop import VirtualLoop

SETTINGS = WeightSettings(
    stage_timeout_s=60, commit_timeout_s=20, finish_timeout_s=30, lease_s=8, converge_timeout_s=60, drain_s=0.5
)
BASE = "/base"
Folder = dict[str, float]


class FakeStaged:
    is_streamed = False

    def __init__(self, content: Folder, unchanged: Sequence[str]) -> None:
        self.content = content
        self.digests = {name: f"{value:g}" for name, value in content.items()}
        self.digest = " ".join(f"{name}={value}" for name, value in sorted(self.digests.items()))
        self.unchanged = tuple(unchanged)
        self.num_bytes = 4 * len(content)

    def discard(self) -> None:
        pass


class FakePark:
    def __init__(self, engine: "FakeEngine") -> None:
        self._engine = engine
        engine.holds.append(self)

    @property
    def is_parked(self) -> bool:
        return self in self._engine.parks

    def park(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002  # the interface of an engine's
        self._engine.may("park", self)
        self._engine.parks.append(self)

    def commit(self, staged: FakeStaged, *, version: int, **_: Any) -> None:
        self._engine.exchange(staged, version)

    def resume(self) -> float:
        if self in self._engine.holds:
            self._engine.holds.remove(self)
        if self in self._engine.parks:
            self._engine.parks.remove(self)
            self._engine.fleet.look()
        return 0.001


class FakeEngine:
    """As ContinuousBatchingManager, as far as a follower needs it."""

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self.fleet = fleet
        self.content = dict(fleet.folders[BASE])
        self.weight_version = 1
        self.parks: list[FakePark] = []
        self.holds: list[FakePark] = []
        """What was settled and not resumed, parked or not."""
        self.fails_to: set[str] = set()
        self.is_busy = False
        """Whether it has requests that do not finish in time."""

    def stage_weights(self, paths: Sequence[str], *, partial: bool = False, **_: Any) -> FakeStaged:
        self._may("stage")
        found: Folder = {}
        for path in paths:
            if path not in self.fleet.folders:
                raise WeightsSourceError(f"there is no folder {path}")
            found |= self.fleet.folders[path]
        content = (self.content | found) if partial else found
        return FakeStaged(content, [name for name in content if name not in found])

    def park(self, *, in_flight: str, **_: Any) -> FakePark:
        self._may("park")
        if self.is_busy and in_flight == "finish":
            raise NotFinished("the running requests did not finish")
        parked = FakePark(self)
        parked.park()
        return parked

    def settle(self, *, in_flight: str, **_: Any) -> FakePark:
        self._may("finish")
        if self.is_busy and in_flight == "finish":
            raise NotFinished("the running requests did not finish")
        return FakePark(self)

    def commit_weights(self, staged: FakeStaged, *, version: int, in_flight: str, **_: Any) -> float:
        if self.is_busy and in_flight == "finish":
            raise NotFinished("the running requests did not finish")
        self.exchange(staged, version)
        return 0.001

    def exchange(self, staged: FakeStaged, version: int) -> None:
        self._may("commit")
        assert version > self.weight_version
        self.content, self.weight_version = dict(staged.content), version
        self.fleet.note_version(version, self.content)
        self.fleet.look()

    def weight_digests(self) -> dict[str, str]:
        return FakeStaged(self.content, ()).digests

    def probe_weights(self, staged: FakeStaged, prompts: list[list[int]]) -> list[list[float]]:
        if any(token_id < 0 for prompt in prompts for token_id in prompt):
            raise InvalidRequest("a probe has an id that is not in the vocabulary")
        return [[staged.content["a"]] * (len(prompt) - 1) for prompt in prompts]

    def may(self, verb: str, held: FakePark) -> None:
        """A hold that cannot park is given up."""
        if verb in self.fails_to:
            self.holds.remove(held)
        self._may(verb)

    def _may(self, verb: str) -> None:
        if verb in self.fails_to:
            raise RuntimeError(f"cannot {verb}")


class Replica:
    """One process: what it runs ends with it."""

    def __init__(self, fleet: "SimulatedFleet", name: str) -> None:
        self.name = name
        self.fleet = fleet
        self.engine = FakeEngine(fleet)
        self.is_alive = True
        self.is_running = False
        self.is_confirmed = False
        self.awake = asyncio.Event()
        self.awake.set()
        manager: Any = self.engine
        self.pauses = LeasedPauses(manager, replica_id=name)
        self.follower = WeightFollower(manager, self.pauses, replica_id=name, base_path=BASE)
        calls = ControllerCalls(
            heartbeat=lambda report: fleet.to_controller(self, lambda weights: weights.heartbeat(report)),
            committed=lambda: fleet.to_controller(self, lambda weights: weights.committed()),
            digests=lambda version: fleet.to_controller(self, lambda weights: weights.digests(version)),
            start_failed=lambda reason: fleet.to_controller(self, lambda weights: weights.start_failed(name, reason)),
            number=lambda: fleet.to_controller(self, lambda weights: weights.number(name)),
        )
        self.member = FleetMember(self.follower, self.pauses, controller=calls, report=self.report)
        self.life = fleet.loop.create_task(self._live())

    @property
    def generates(self) -> bool:
        return self.is_alive and self.awake.is_set() and self.is_confirmed and not self.engine.parks

    async def report(self) -> ReplicaReport:
        follower = self.follower
        return ReplicaReport(
            self.name,
            follower.version,
            follower.state,
            follower.source,
            error=follower.error,
            swap_id=follower.swap_id,
            reply=follower.reply,
            leases=self.pauses.orders,
            cast=follower.cast,
            number=self.member.number,
        )

    def end(self) -> None:
        """Dies at once, in whatever it is doing."""
        self.is_alive = False
        self.life.cancel()
        self.engine.parks.clear()
        self.engine.holds.clear()

    async def _live(self) -> None:
        try:
            await self.member.join()
        except (CannotJoin, ConnectionError, TimeoutError):
            # Serve tries with another process.
            self.is_alive = False
            self.fleet.loop.call_later(1.0, self.fleet.replace, self.name)
            return
        self.is_running = True
        beats = self.fleet.loop.create_task(self._beat())
        try:
            await self.member.confirm()
            self.is_confirmed = True
            self.fleet.look()
            await beats
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        while True:
            await self.awake.wait()
            with suppress(ConnectionError, TimeoutError):
                await self.member.beat()
            await asyncio.sleep(SETTINGS.heartbeat_interval_s)


class SimulatedFleet:
    """Serve, its replicas and its controller. `look` is called wherever it may have changed who generates what."""

    def __init__(self, loop: VirtualLoop, folder: Path | None, *, seed: int = 0, loss: float = 0.0) -> None:
        self.loop = loop
        self.folder = folder
        self.random = random.Random(seed)
        self.loss = loss
        self.folders: dict[str, Folder] = {BASE: {"a": 0.0, "b": 0.0}}
        self.replicas: dict[str, Replica] = {}
        self.weights: FleetWeights | None = None
        self.requests: set[asyncio.Task[Any]] = set()
        self.killed: list[str] = []
        self.contents: dict[int, Folder] = {1: dict(self.folders[BASE])}
        self.is_synchronous = True
        self.violations: list[str] = []
        self.num_replicas = 0
        self.alone_s = 0.0
        """For how long the controller reads weights where no replica runs."""
        self.heard: list[tuple[str, str]] = []
        """(replica, phase) of every call that was carried out."""
        self.before_call: Callable[[str, Replica], Awaitable[None]] | None = None

    # What happens to it

    def start_controller(self) -> FleetWeights:
        history = WeightHistory(
            application="pitstop", model="base", folder=self.folder and str(self.folder), num_earlier=16, layout="x"
        )
        self.weights = FleetWeights(
            SETTINGS,
            history,
            call_all=self._call_all,
            count_running=self.count_running,
            check_alone=self._check_alone,
            kill=self._kill,
        )
        return self.weights

    def kill_controller(self) -> None:
        """Dies at once, in whatever it is doing."""
        self.weights = None
        for task in self.requests:
            task.cancel()
        self.requests.clear()

    def add(self) -> Replica:
        name = f"r{self.num_replicas}"
        self.num_replicas += 1
        self.replicas[name] = Replica(self, name)
        return self.replicas[name]

    def kill(self, name: str) -> None:
        self.replicas.pop(name).end()

    def replace(self, name: str) -> None:
        """As Serve does with a replica that died."""
        if name in self.replicas:
            self.replicas.pop(name).end()
            self.add()

    def request(self, work: Any) -> "asyncio.Task[Any]":
        """Begins what somebody asks of the controller."""
        task = self.loop.create_task(work)
        self.requests.add(task)
        task.add_done_callback(self._ended)
        return task

    def swap(self, path: str, **options: Any) -> "asyncio.Task[Any]":
        assert self.weights is not None
        return self.request(self.weights.swap(SwapRequest(WeightSource(path), **options)))

    def pass_time(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))

    # What is true of it

    def versions(self) -> set[int]:
        return {replica.follower.version for replica in self.replicas.values() if replica.is_alive}

    def generating(self) -> dict[str, int]:
        return {name: one.engine.weight_version for name, one in self.replicas.items() if one.generates}

    def look(self) -> None:
        """Called at every change: in a fleet of synchronous swaps no two versions generate at once."""
        versions = set(self.generating().values())
        if self.is_synchronous and len(versions) > 1:
            # Kept, as an error raised here would be taken for one of an engine.
            self.violations.append(f"two versions generate at once: {self.generating()}")

    def note_version(self, version: int, content: Folder) -> None:
        """Called at every commit: one number never means two weights."""
        if self.contents.setdefault(version, dict(content)) != content:
            self.violations.append(f"version {version} has two contents")

    async def count_running(self) -> int:
        return sum(replica.is_running and replica.is_alive for replica in self.replicas.values())

    # The transport

    async def to_controller(self, replica: Replica, call: Callable[[FleetWeights], Awaitable[Any]]) -> Any:
        await asyncio.sleep(self._latency())
        await replica.awake.wait()
        weights = self.weights
        if weights is None or self._is_lost():
            raise ConnectionError("the controller is away")
        answer = await call(weights)
        await asyncio.sleep(self._latency())
        await replica.awake.wait()
        if self.weights is not weights or self._is_lost():
            raise ConnectionError("the answer was lost")
        return answer

    async def _call_all(self, method: str, argument: object, *, timeout_s: float) -> list[Any]:
        heard = [replica for replica in self.replicas.values() if replica.is_running and replica.is_alive]
        calls = [self.loop.create_task(self._call(replica, method, argument)) for replica in heard]
        if not calls:
            return []
        done, late = await asyncio.wait(calls, timeout=timeout_s)
        if late:
            raise TimeoutError
        return [answer for answer in (call.result() for call in done) if answer is not None]

    async def _call(self, replica: Replica, method: str, argument: object) -> Any:
        await asyncio.sleep(self._latency())
        if self._is_lost():
            return None
        if self.before_call is not None:
            await self.before_call(method, replica)
        await replica.awake.wait()
        if not replica.is_alive:
            return ConnectionError(f"{replica.name} died")
        self.heard.append((replica.name, method))
        target = replica.pauses if method in ("pause", "end_pauses") else replica.follower
        answer = await getattr(target, {"end_pauses": "end"}.get(method, method))(argument)
        await asyncio.sleep(self._latency())
        await replica.awake.wait()
        if not replica.is_alive:
            return ConnectionError(f"{replica.name} died")
        return None if self._is_lost() else answer

    async def _check_alone(self, order: SwapOrder) -> Checked | None:
        if await self.count_running():
            return None
        await asyncio.sleep(self.alone_s)
        content: Folder = {}
        source = order.source
        under = [BASE] if source is None or source.on_model else []
        for path in [*under, *(source.folders if source is not None else ())]:
            if path not in self.folders:
                raise WeightsSourceError(f"there is no folder {path}")
            content |= self.folders[path]
        staged = FakeStaged(content, ())
        changed = (
            {name for path in order.changes.folders for name in self.folders[path]} if order.changes else {*content}
        )
        unchanged = [name for name in content if name not in changed]
        return Checked(staged.digest, staged.num_bytes, StagedDetails(staged.digests, unchanged))

    async def _kill(self, name: str) -> None:
        self.killed.append(name)
        self.replace(name)

    def _latency(self) -> float:
        return self.random.choice((0.001, 0.01, 0.2)) if self.loss else 0.001

    def _is_lost(self) -> bool:
        return self.random.random() < self.loss

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self.requests.discard(task)
        if not task.cancelled():
            task.exception()


def committed_of(fleet: SimulatedFleet) -> CommittedWeights:
    assert fleet.weights is not None
    return fleet.loop.run(fleet.weights.committed())
