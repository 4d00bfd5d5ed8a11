"""The autoscaling policy: enough replicas for the work, no flapping, and never an exception."""

from typing import Any

import pytest

from serve_app.autoscaling import WorkPolicy, replicas_needed


class Context:
    """The part of Serve's context that the policy reads."""

    def __init__(self, metrics: Any, *, target: int = 1, state: dict[str, Any] | None = None) -> None:
        self.aggregated_metrics = metrics
        self.target_num_replicas = target
        self.policy_state = state or {}


@pytest.mark.parametrize(
    ("work_s", "num_requests", "current", "expected"),
    [
        (0, 0, 1, 1),
        (5, 10, 1, 1),
        (11, 10, 1, 2),
        (95, 50, 2, 10),
        (100, 1, 1, 1),  # one long request cannot be shared
        (100, 3, 1, 3),
        (9, 10, 2, 2),  # fits one replica, but without room
        (6, 10, 2, 1),
        (0, 0, 4, 1),
        (6, 1, 3, 1),
    ],
)
def test_replicas_follow_the_work(work_s: float, num_requests: float, current: int, expected: int) -> None:
    assert replicas_needed(work_s=work_s, num_requests=num_requests, current=current, target_work_s=10.0) == expected


def test_a_constant_load_never_flaps() -> None:
    for work_s in range(200):
        current = 1
        seen = []
        for _ in range(6):
            current = replicas_needed(work_s=work_s, num_requests=100, current=current, target_work_s=10.0)
            seen.append(current)
        assert len(set(seen)) == 1, f"{work_s} s of work gave {seen}"


def test_the_policy_adds_up_what_the_replicas_report() -> None:
    wanted, _ = WorkPolicy(10.0)(Context({"work_s": {"a": 12.0, "b": 9.0}, "num_requests": {"a": 4, "b": 4}}))  # type: ignore[arg-type]
    assert wanted == 3


@pytest.mark.parametrize("metrics", [None, {}, {"work_s": {}}])
def test_without_reports_one_replica_is_wanted(metrics: Any) -> None:
    assert WorkPolicy(10.0)(Context(metrics))[0] == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("metrics", [{"work_s": {"a": float("nan")}}, {"work_s": {"a": "many"}}, 7])
def test_nonsense_keeps_the_fleet_as_it_is_and_is_counted(metrics: Any) -> None:
    policy = WorkPolicy(10.0)
    wanted, state = policy(Context(metrics, target=3))  # type: ignore[arg-type]
    assert (wanted, state) == (3, {"failures": 1})
    assert policy(Context(metrics, target=3, state=state))[1] == {"failures": 2}  # type: ignore[arg-type]
