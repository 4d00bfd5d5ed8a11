"""The policy that Serve asks: what replicas report, what became of its decisions and why, and never an exception."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.scaling.meter import ScalingMeter
from serve_app.scaling.work_policy import MAX_CHANGES, WorkPolicy, fleet_load
from serve_app.scaling_report import ScalingChange, ScalingReport

TARGETS = {"minimum": 1, "maximum": 4, "work_s": 10.0, "up_after_s": 0.0, "down_after_s": 0.0}
SLOW = {"step_s": 0.02, "request_s": 0.002, "token_s": 0.001, "max_running": 8.0}


def context(metrics: Any = None, *, target: int = 1, current: int | None = None, queued: float = 0.0) -> Any:
    """The part of Serve's context that the policy reads."""
    return SimpleNamespace(
        aggregated_metrics=metrics,
        target_num_replicas=target,
        current_num_replicas=target if current is None else current,
        total_queued_requests=queued,
        app_name="app",
    )


def reports(**replicas: dict[str, float]) -> dict[str, dict[str, float]]:
    """What Serve makes of the reports: by name, then by replica."""
    names = {name for report in replicas.values() for name in report}
    return {name: {replica: report[name] for replica, report in replicas.items() if name in report} for name in names}


def policy(told: list[ScalingReport] | None = None, **targets: float) -> WorkPolicy:
    return WorkPolicy({**TARGETS, **targets}, tell=[].append if told is None else told.append)


def test_the_context_of_serve_has_what_is_read() -> None:
    names = set(vars(context()))
    given = AutoscalingContext.__init__.__code__.co_varnames
    assert names <= set(given)


def test_work_and_requests_add_up_and_speeds_are_those_of_replicas_that_know_theirs() -> None:
    load = fleet_load(
        context(
            reports(
                a={"work_s": 12.0, "num_requests": 3, "kv_usage": 0.5, **SLOW},
                b={"work_s": 4.0, "num_requests": 1, "kv_usage": 0.1, **dict.fromkeys(SLOW, 0.0)},
            ),
            target=2,
            queued=5.0,
        )
    )
    assert (load.work_s, load.num_requests, load.waiting_elsewhere) == (16.0, 4.0, 5.0)
    assert load.kv_usage == pytest.approx(0.3)
    assert (load.step_s, load.max_running) == (0.02, 8.0)
    assert fleet_load(context(None)).work_s == 0


def test_more_work_asks_for_more_replicas_and_none_for_the_fewest() -> None:
    busy = reports(a={"work_s": 35.0, "num_requests": 9.0, **SLOW})
    assert policy(token_time_s=1.0)(context(busy)) == (4, {})
    assert policy()(context({}, target=3)) == (1, {})
    assert policy(minimum=2)(context({}, target=3)) == (2, {})


def test_a_change_is_told_with_its_reason_once_serve_has_made_it() -> None:
    told: list[ScalingReport] = []
    ask = policy(told, token_time_s=1.0)
    busy = reports(a={"work_s": 35.0, "num_requests": 3.0, **SLOW})
    assert ask(context({}))[0] == 1
    assert ask(context(busy))[0] == 3
    assert told[-1].changes == ()
    assert (told[-1].num_replicas, told[-1].needed, told[-1].reason) == (3, 3, "work")
    ask(context({}, target=3, current=1))
    (change,) = told[-1].changes
    assert (change.number, change.before, change.after, change.reason, change.direction) == (1, 1, 3, "work", "up")
    assert "35.0 s of work" in change.why
    ask(context({}, target=1))
    assert [(one.before, one.after, one.direction) for one in told[-1].changes] == [(3, 1, "down"), (1, 3, "up")]


def test_what_others_decide_is_told_as_theirs() -> None:
    told: list[ScalingReport] = []
    ask = policy(told, minimum=0, idle_s=0.0)
    ask(context({}))
    ask(context({}, target=0))
    # Serve itself starts the first replica, and does not ask meanwhile.
    ask(context({}, target=1))
    ask(context({}, target=4))
    assert [change.reason for change in told[-1].changes] == ["config", "wake", "idle"]
    ask(context({}, target=4))
    ask(context({}, target=1))
    ask(context({}, target=0))
    assert [change.reason for change in told[-1].changes[:2]] == ["idle", "idle"]
    for target in [1, 2] * MAX_CHANGES:
        ask(context({}, target=target))
    assert len(told[-1].changes) == MAX_CHANGES


@pytest.mark.parametrize("metrics", [{"work_s": {"a": float("nan")}}, {"work_s": {"a": "many"}}, 7])
def test_nonsense_keeps_the_fleet_as_it_is_and_is_counted(metrics: Any) -> None:
    told: list[ScalingReport] = []
    ask = policy(told)
    for number in (1, 2):
        assert ask(context(metrics, target=3)) == (3, {})
        assert told[-1].num_failures == number
    assert ask(context({}, target=3))[0] == 1


def test_a_report_that_cannot_be_sent_changes_no_decision() -> None:
    def fail(_: ScalingReport) -> None:
        raise RuntimeError

    assert WorkPolicy(TARGETS, tell=fail)(context({}, target=2)) == (1, {})


def test_each_change_is_counted_once_and_a_new_policy_counts_again() -> None:
    recorder = Recorder(CONTROLLER_METRICS)
    meter = ScalingMeter(recorder, num_replicas=2)
    assert "pitstop_replicas_wanted 2.0" in recorder.expose()
    first, second = (ScalingChange(number, 0.0, number, number + 1, "work", "much work") for number in (1, 2))
    news = [
        meter.take(ScalingReport("a", changes, num_replicas=3, num_failures=2))
        for changes in ((first,), (first,), (second, first), (second, first))
    ]
    assert news == [(first,), (), (second,), ()]
    assert 'decisions_total{direction="up",reason="work"} 2.0' in recorder.expose()
    assert "pitstop_scaling_failures_total 2.0" in recorder.expose()
    assert "pitstop_replicas_wanted 3.0" in recorder.expose()
    down = ScalingChange(1, 0.0, 3, 1, "idle", "nothing to do")
    meter.take(ScalingReport("b", (down,), num_replicas=1, num_failures=1))
    assert 'decisions_total{direction="down",reason="idle"} 1.0' in recorder.expose()
    assert "pitstop_scaling_failures_total 3.0" in recorder.expose()
    assert meter.report is not None
    assert meter.report.source == "b"
