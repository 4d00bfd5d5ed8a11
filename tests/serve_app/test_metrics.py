"""Metrics: one table, one exposition for the fleet, bounded labels."""

from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families

from engine import EngineStats
from serve_app.metrics import (
    CONTROLLER_METRICS,
    ENGINE_METRICS,
    METRICS,
    REPLICA_METRICS,
    Recorder,
    expose_engine,
    merge_expositions,
)

STATS = EngineStats(num_waiting=3, is_alive=True, generated_tokens_total=40, requests_total={"stop": 2, "length": 1})


def samples(exposition: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def test_every_name_is_unique_prefixed_and_has_a_help_text() -> None:
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for spec in METRICS:
        assert spec.name.startswith("pitstop_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.help.endswith(".")


def test_labels_are_only_those_with_few_values() -> None:
    assert {label for spec in METRICS for label in spec.labels} <= {
        "replica",
        "finish_reason",
        "state",
        "outcome",
        "route",
        "status",
        "version",
    }


def test_every_number_of_the_engine_is_exposed() -> None:
    shown = {spec.stat for spec in ENGINE_METRICS}
    assert {field.name for field in fields(EngineStats)} - shown == {"page_size"}


def test_engine_numbers_carry_the_replica_and_finish_reasons() -> None:
    found = samples(expose_engine(STATS, replica="1"))
    assert found["pitstop_requests_waiting", (("replica", "1"),)] == 3
    assert found["pitstop_engine_alive", (("replica", "1"),)] == 1
    assert found["pitstop_generated_tokens_total", (("replica", "1"),)] == 40
    assert found["pitstop_requests_total", (("finish_reason", "stop"), ("replica", "1"))] == 2


def test_expositions_of_several_replicas_merge_into_one() -> None:
    recorder = Recorder(CONTROLLER_METRICS)
    recorder.set_gauge("pitstop_committed_weight_version", value=4)
    merged = merge_expositions(
        [expose_engine(STATS, replica="0"), expose_engine(EngineStats(num_waiting=5), replica="1"), recorder.expose()]
    )
    found = samples(merged)
    assert found["pitstop_requests_waiting", (("replica", "0"),)] == 3
    assert found["pitstop_requests_waiting", (("replica", "1"),)] == 5
    assert found["pitstop_committed_weight_version", ()] == 4
    assert merged.count("# TYPE pitstop_requests_waiting gauge") == 1


def test_a_series_that_comes_twice_is_shown_once() -> None:
    found = samples(merge_expositions([expose_engine(STATS, replica="0"), expose_engine(STATS, replica="0")]))
    assert found["pitstop_requests_waiting", (("replica", "0"),)] == 3


def test_nothing_merges_to_nothing() -> None:
    assert merge_expositions([]) == ""


def test_recorded_numbers_move() -> None:
    recorder = Recorder(REPLICA_METRICS)
    recorder.observe("pitstop_time_to_first_token_seconds", "0", value=0.02)
    recorder.count("pitstop_heartbeat_failures_total", "0")
    recorder.count("pitstop_heartbeat_failures_total", "0")
    found = samples(recorder.expose())
    assert found["pitstop_heartbeat_failures_total", (("replica", "0"),)] == 2
    assert found["pitstop_time_to_first_token_seconds_count", (("replica", "0"),)] == 1
    assert found["pitstop_time_to_first_token_seconds_bucket", (("le", "0.01"), ("replica", "0"))] == 0
    assert not any(name.endswith("_created") for name, _ in found)


def test_two_recorders_do_not_share_numbers() -> None:
    first, second = Recorder(CONTROLLER_METRICS), Recorder(CONTROLLER_METRICS)
    first.count("pitstop_swaps_total", "committed")
    assert ("pitstop_swaps_total", (("outcome", "committed"),)) not in samples(second.expose())
