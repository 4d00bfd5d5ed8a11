"""A model check: random swaps, deaths, silences, restarts and losses, and what has to hold through all of them.

At every moment: one number never means two weights, and in a fleet of synchronous swaps no two versions generate at
once. Once the faults end: everybody generates, with the committed version, whatever it took.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import PitstopError
from serve_app.messages import PauseRequest, RollbackRequest, SwapResult
from tests.serve_app.simulated_fleet import Replica, SimulatedFleet
from tests.serve_app.virtual_loop import VirtualLoop

QUIET_S = 400.0
"""Virtual seconds without faults, above the sum of all deadlines that may be under way."""
MAX_REPLICAS = 4
RESTART_S = 20.0
"""Of a controller; longer than a lease."""
PHASES = ("stage", "finish", "park", "vote", "commit", "commit", "resume", "abort")
FAULTS = ("silence", "death", "start", "restart")


class FleetMachine(RuleBasedStateMachine):
    """Synchronous swaps only."""

    strategies = ("synchronous",)

    @initialize(seed=st.integers(0, 2**16), loss=st.sampled_from((0.0, 0.02, 0.1)))
    def start(self, seed: int, loss: float) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.fleet = SimulatedFleet(VirtualLoop(), Path(self.folder.name), seed=seed, loss=loss)
        self.fleet.loop.thread_delay = lambda: self.fleet.random.choice((0.0, 0.001, 0.3))
        asyncio.set_event_loop(self.fleet.loop)
        self.fleet.alone_s = self.fleet.random.choice((0.0, 0.1, 3.0))
        self.fleet.is_synchronous = self.strategies == ("synchronous",)
        self.fleet.folders |= {f"/{number}": {"a": float(number), "b": float(number)} for number in range(1, 4)}
        self.fleet.folders["/part"] = {"b": 9.0}
        self.fleet.start_controller()
        self.asked: list[asyncio.Task[Any]] = []
        self.armed: list[tuple[str, str]] = []
        self.fleet.before_call = self._strike
        for _ in range(2):
            self.fleet.add()
        self.fleet.pass_time(5)

    @property
    def names(self) -> list[str]:
        return list(self.fleet.replicas)

    @rule(seconds=st.sampled_from((0.001, 0.01, 0.1, 0.5, 2.0, 12.0)))
    def time_passes(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    @precondition(lambda self: self.fleet.weights is not None)
    @rule(path=st.sampled_from(("/1", "/2", "/3", "/gone")), data=st.data(), verify=st.booleans())
    def somebody_swaps(self, path: str, data: st.DataObject, verify: bool) -> None:
        strategy = data.draw(st.sampled_from(self.strategies))
        on_failure = data.draw(st.sampled_from(("continue", "rollback"))) if strategy == "rolling" else "continue"
        in_flight = data.draw(st.sampled_from(("keep", "finish")))
        self.asked.append(
            self.fleet.swap(path, strategy=strategy, on_failure=on_failure, verify=verify, in_flight=in_flight)
        )
        self.fleet.pass_time(0)

    @precondition(lambda self: self.fleet.weights is not None)
    @rule()
    def somebody_swaps_a_part(self) -> None:
        self.asked.append(self.fleet.swap("/part", partial=True))

    @precondition(lambda self: self.fleet.weights is not None)
    @rule()
    def somebody_rolls_back(self) -> None:
        assert self.fleet.weights is not None
        self.asked.append(self.fleet.request(self.fleet.weights.rollback(RollbackRequest())))

    @precondition(lambda self: self.fleet.weights is not None)
    @rule(lease_s=st.sampled_from((1.0, 20.0)))
    def somebody_pauses(self, lease_s: float) -> None:
        assert self.fleet.weights is not None
        self.asked.append(self.fleet.request(self.fleet.weights.pause(PauseRequest(lease_s))))

    @precondition(lambda self: self.fleet.weights is not None)
    @rule()
    def somebody_resumes(self) -> None:
        assert self.fleet.weights is not None
        self.fleet.request(self.fleet.weights.resume())

    @precondition(lambda self: len(self.names) < MAX_REPLICAS)
    @rule()
    def a_replica_starts(self) -> None:
        self.fleet.add()

    @precondition(lambda self: len(self.names) > 1)
    @rule(data=st.data())
    def a_replica_dies(self, data: st.DataObject) -> None:
        self.fleet.replace(data.draw(st.sampled_from(self.names)))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def a_replica_falls_silent(self, data: st.DataObject) -> None:
        self.fleet.replicas[data.draw(st.sampled_from(self.names))].awake.clear()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def a_replica_wakes(self, data: st.DataObject) -> None:
        self.fleet.replicas[data.draw(st.sampled_from(self.names))].awake.set()
        self.fleet.look()

    @precondition(lambda self: self.names)
    @rule(data=st.data(), verb=st.sampled_from(("stage", "finish", "park", "commit")))
    def a_replica_breaks(self, data: st.DataObject, verb: str) -> None:
        self.fleet.replicas[data.draw(st.sampled_from(self.names))].engine.fails_to.add(verb)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def a_replica_has_long_requests(self, data: st.DataObject) -> None:
        self.fleet.replicas[data.draw(st.sampled_from(self.names))].engine.is_busy = True

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def a_replica_is_mended(self, data: st.DataObject) -> None:
        engine = self.fleet.replicas[data.draw(st.sampled_from(self.names))].engine
        engine.fails_to.clear()
        engine.is_busy = False

    @precondition(lambda self: self.fleet.weights is not None)
    @rule()
    def the_controller_dies(self) -> None:
        self.fleet.kill_controller()

    @precondition(lambda self: self.fleet.weights is None)
    @rule()
    def the_controller_restarts(self) -> None:
        self.fleet.start_controller()

    @rule(phase=st.sampled_from(PHASES), fault=st.sampled_from(FAULTS))
    def something_is_to_happen(self, phase: str, fault: str) -> None:
        """At the next call for this phase: at random, nobody would die in the milliseconds between two of them."""
        self.armed.append((phase, fault))

    async def _strike(self, phase: str, replica: Replica) -> None:
        for armed in [one for one in self.armed if one[0] == phase]:
            self.armed.remove(armed)
            if armed[1] == "silence":
                replica.awake.clear()
            elif armed[1] == "death":
                self.fleet.replace(replica.name)
            elif armed[1] == "start" and len(self.names) < MAX_REPLICAS:
                self.fleet.add()
                await asyncio.sleep(2.0)
            elif armed[1] == "restart" and self.fleet.weights is not None:
                self.fleet.kill_controller()
                self.fleet.loop.call_later(RESTART_S, self._restart)

    def _restart(self) -> None:
        if self.fleet.weights is None:
            self.fleet.start_controller()

    @invariant()
    def nobody_generates_what_was_never_committed(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.look()
            assert self.fleet.violations == []
            for replica in self.fleet.replicas.values():
                assert replica.engine.content == self.fleet.contents[replica.engine.weight_version]

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            self._all_is_well_after_the_faults()
        finally:
            self.fleet.loop.end()
            asyncio.set_event_loop(None)
            self.folder.cleanup()

    def _all_is_well_after_the_faults(self) -> None:
        fleet = self.fleet
        self.armed.clear()
        fleet.loss = 0.0
        for replica in fleet.replicas.values():
            replica.awake.set()
            replica.engine.fails_to.clear()
            replica.engine.is_busy = False
        if fleet.weights is None:
            fleet.start_controller()
        fleet.pass_time(QUIET_S)
        assert fleet.weights is not None
        assert fleet.violations == []
        status = fleet.loop.run(fleet.weights.status())
        assert status.swap_in_progress is None
        assert status.pauses == []
        version = status.committed.version
        assert set(fleet.generating()) == set(fleet.replicas), "somebody is paused, or never started"
        assert set(fleet.generating().values()) == {version}
        assert not any(replica.engine.holds for replica in fleet.replicas.values()), "some requests are held back"
        assert not any(replica.follower.is_fenced for replica in fleet.replicas.values())
        assert {one.version for one in status.history} <= set(fleet.contents)
        for task in self.asked:
            assert task.done(), "a request was never answered"
            if not task.cancelled() and isinstance(task.exception(), BaseException):
                assert isinstance(task.exception(), PitstopError), repr(task.exception())
            elif not task.cancelled() and isinstance(task.result(), SwapResult):
                assert task.result().version <= version


class MixedMachine(FleetMachine):
    """Rolling swaps among them, in which versions mix for a while."""

    strategies = ("synchronous", "rolling")


@pytest.mark.parametrize("machine", [FleetMachine, MixedMachine])
@pytest.mark.parametrize("num_examples", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_a_fleet_always_converges_to_one_version_and_resumes(machine: type[FleetMachine], num_examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            # A counterexample is printed as it was found: to make it shorter may take longer than a test may.
            phases=[Phase.generate],
        ),
    )
