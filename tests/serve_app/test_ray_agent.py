"""The copy for Ray's agent: what it would be sent, without a Ray."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from serve_app import ray_agent
from serve_app.metrics import CONTROLLER_METRICS, REPLICA_METRICS, ROUTER_METRICS, MetricSpec, Recorder
from serve_app.ray_agent import AgentMirror, names_at_agent


class FakeMetric:
    """Records what Ray's own class would be told."""

    told: ClassVar[list[tuple[str, float, dict[str, str]]]] = []

    def __init__(self, name: str, tag_keys: tuple[str, ...]) -> None:
        self.name = name
        self.tag_keys = set(tag_keys)

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self.tag_keys
        self.told.append((self.name, value, tags))

    set = inc


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, dict[str, str]]]:
    monkeypatch.setattr(FakeMetric, "told", [])
    monkeypatch.setattr(ray_agent, "Counter", FakeMetric)
    monkeypatch.setattr(ray_agent, "Gauge", FakeMetric)
    return FakeMetric.told


def test_counters_are_sent_by_what_they_have_grown_and_gauges_as_they_are(told: list[Any]) -> None:
    recorder = Recorder(REPLICA_METRICS)
    mirror = AgentMirror(recorder.expose, interval_s=1)
    recorder.count("pitstop_heartbeat_failures_total", "0", amount=3)
    recorder.set_gauge("pitstop_work_seconds", "0", value=2.5)
    mirror.copy()
    recorder.count("pitstop_heartbeat_failures_total", "0", amount=2)
    mirror.copy()
    mirror.copy()
    counted = [value for name, value, _ in told if name == "pitstop_heartbeat_failures"]
    assert counted == [3, 2]
    assert [value for name, value, _ in told if name == "pitstop_work_seconds"] == [2.5] * 3


def test_a_histogram_is_sent_as_its_sum_and_count(told: list[Any]) -> None:
    recorder = Recorder(REPLICA_METRICS)
    for value in (0.5, 1.5):
        recorder.observe("pitstop_replica_generation_seconds", "1", value=value)
    AgentMirror(recorder.expose, interval_s=1).copy()
    assert sorted(told) == [
        ("pitstop_replica_generation_seconds_count", 2, {"replica": "1"}),
        ("pitstop_replica_generation_seconds_sum", 2, {"replica": "1"}),
    ]


@pytest.mark.parametrize("specs", [REPLICA_METRICS, CONTROLLER_METRICS, ROUTER_METRICS])
def test_every_metric_has_the_names_at_the_agent_that_the_page_of_metrics_tells(
    told: list[Any], specs: tuple[MetricSpec, ...]
) -> None:
    recorder = Recorder(specs)
    for spec in specs:
        if spec.kind == "counter":
            recorder.count(spec.name, *spec.labels)
        elif spec.kind == "gauge":
            recorder.set_gauge(spec.name, *spec.labels, value=1)
        else:
            recorder.observe(spec.name, *spec.labels, value=0.1)
    AgentMirror(recorder.expose, interval_s=1).copy()
    gauges = {spec.name for spec in specs if spec.kind == "gauge"}
    # As Ray shows them: `ray_` before every name, and `_total` behind every counter.
    shown = {f"ray_{name}" if name in gauges else f"ray_{name}_total" for name, _, _ in told}
    assert shown == {name for spec in specs for name in names_at_agent(spec)}


def test_the_page_of_metrics_says_what_differs_at_the_agent() -> None:
    page = (Path(__file__).parents[2] / "configs" / "prometheus" / "METRICS.md").read_text()
    section = page.partition("## At Ray's metrics agent")[2].partition("\n## ")[0]
    assert "ray_pitstop_time_to_first_token_seconds_sum_total" in section
    assert "no buckets" in section
    assert "no alias" in section
