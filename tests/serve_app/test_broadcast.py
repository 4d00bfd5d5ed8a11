"""Calls to every replica where some are silent, over Ray's own response class and in virtual time."""

import asyncio
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from serve_app.broadcast import ask_each, call_all
from serve_app.router.fleet import METRICS_TIMEOUT_S, Fleet
from serve_app.settings import AppSettings
from tests.serve_app.virtual_loop import VirtualLoop


class Replica:
    """Answers, or fails, after a while."""

    def __init__(self, answer: Any, *, after_s: float = 0.1) -> None:
        self.answer = answer
        self.after_s = after_s
        self.is_left = False

    async def get_async(self) -> Any:
        try:
            await asyncio.sleep(self.after_s)
        except asyncio.CancelledError:
            self.is_left = True
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Handle:
    """As Serve's, of these replicas. starts_s: how long Serve takes to know them."""

    app_name = "app"

    def __init__(self, *replicas: Replica, starts_s: float = 0.0) -> None:
        self.replicas = replicas
        self.starts_s = starts_s

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, method: str, *_: Any) -> DeploymentBroadcastResponse:
        assert method == "metrics"
        return DeploymentBroadcastResponse(self._send(), None)

    async def _send(self) -> Any:
        await asyncio.sleep(self.starts_s)
        if not self.replicas:
            raise DeploymentUnavailableError(None)  # type: ignore[arg-type]  # nobody asks which
        return list(self.replicas)


SILENT_S = 1e6


def asked(loop: VirtualLoop, call: Any, *replicas: Replica, starts_s: float = 0.0) -> Any:
    handle: Any = Handle(*replicas, starts_s=starts_s)
    return loop.run(call(handle, "metrics", timeout_s=2.0))


@pytest.mark.parametrize("num_silent", [0, 1, 3])
def test_the_answers_of_all_but_the_silent_come_in_time(loop: VirtualLoop, num_silent: int) -> None:
    silent = [Replica("late", after_s=SILENT_S) for _ in range(num_silent)]
    failed = ValueError("broken")
    answers = asked(loop, ask_each, *silent, Replica("a"), Replica(failed), Replica("b", after_s=1.9))
    assert {str(answer) for answer in answers} == {"a", "b", "broken"}
    assert len(answers) == 3
    assert loop.time() == pytest.approx(2.0 if num_silent else 1.9, abs=0.01)
    assert all(replica.is_left for replica in silent)


def test_nobody_to_ask_and_nobody_known_in_time_give_no_answers(loop: VirtualLoop) -> None:
    assert asked(loop, ask_each) == []
    assert asked(loop, ask_each, Replica("a"), starts_s=SILENT_S) == []
    assert asked(loop, ask_each, Replica("a", after_s=SILENT_S)) == []
    assert loop.time() == pytest.approx(4.0, abs=0.01)


def test_what_every_replica_has_to_do_fails_where_one_is_silent(loop: VirtualLoop) -> None:
    with pytest.raises(TimeoutError):
        asked(loop, call_all, Replica("a"), Replica("late", after_s=SILENT_S))
    assert asked(loop, call_all) == []


@pytest.mark.parametrize("silent", ["router", "engine", "controller"])
def test_one_silent_part_takes_no_other_part_off_the_page(loop: VirtualLoop, silent: str) -> None:
    parts = {
        name: Handle(Replica(f"{name} 0"), Replica(f"{name} 1", after_s=SILENT_S if name == silent else 0.1))
        for name in ("router", "engine", "controller")
    }
    engine: Any = parts["engine"]
    controller: Any = parts["controller"]
    router: Any = parts["router"]
    fleet = Fleet(AppSettings(model="/m"), engine=engine, controller=controller, routers=lambda: router)
    pages = loop.run(fleet.metrics())
    assert set(pages) == {f"{name} {index}" for name in parts for index in "01"} - {f"{silent} 1"}
    assert loop.time() == pytest.approx(METRICS_TIMEOUT_S, abs=0.01)
