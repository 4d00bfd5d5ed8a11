"""Metrics: one table, one exposition for the fleet, bounded labels."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import EngineStats
from serve_app.metric_aliases import with_aliases
from serve_app.metrics import (
    BUCKETS,
    CONTROLLER_METRICS,
    ENGINE_METRICS,
    METRICS,
    REPLICA_METRICS,
    ROUTER_METRICS,
    MetricSpec,
    Recorder,
    expose_engine,
    merge_expositions,
)
from serve_app.settings import BUCKET_NAMES, parse_settings

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


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("pitstop_kv_blocks_used", "blocks"),
        ("pitstop_kv_blocks_on_host", "blocks"),
        ("pitstop_kv_blocks_evicted_total", "blocks"),
        ("pitstop_kv_block_tokens", "tokens"),
        ("pitstop_queued_tokens_at_router", "tokens"),
        ("pitstop_version_tokens_total", "tokens"),
        ("pitstop_http_requests_in_flight", "requests"),
        ("pitstop_requests_waiting_for_weights", "requests"),
        ("pitstop_token_staleness_versions", "versions"),
        ("pitstop_replicas_wanted", "replicas"),
        ("pitstop_replica_starts_total", "starts"),
        ("pitstop_step_prompt_token_seconds", "seconds"),
        ("pitstop_decode_tokens_per_second", "tokens_per_second"),
        ("pitstop_engine_paused", "1"),
    ],
)
def test_a_unit_is_what_is_counted(name: str, unit: str) -> None:
    (spec,) = (spec for spec in METRICS if spec.name == name)
    assert spec.unit == unit


def test_only_what_is_true_or_not_has_no_unit() -> None:
    assert {spec.name for spec in METRICS if spec.unit == "1"} == {
        spec.name for spec in METRICS if spec.help.startswith("1 while")
    }
    # A text that begins with a quantity is of the same one.
    quantity = re.compile(r"(?:\w+ )?(blocks|tokens|bytes|versions|seconds)\b", re.IGNORECASE)
    told = [(spec, found[1].lower()) for spec in METRICS if (found := quantity.match(spec.help))]
    assert len(told) > 20
    assert [(spec.name, spec.unit) for spec, unit in told if spec.unit != unit] == []


def test_labels_are_only_those_with_few_values() -> None:
    assert {label for spec in METRICS for label in spec.labels} <= {
        "replica",
        "finish_reason",
        "state",
        "outcome",
        "reason",
        "route",
        "status",
        "behind",
        "code",
        "phase",
        "router",
        "kind",
        "direction",
    }


def test_every_number_of_the_engine_is_exposed() -> None:
    assert {field.name for field in fields(EngineStats)} - {spec.stat for spec in ENGINE_METRICS} == set()


@pytest.mark.parametrize("spec", ENGINE_METRICS, ids=[spec.name for spec in ENGINE_METRICS])
def test_every_number_of_the_engine_moves_its_own_series_alone(spec: MetricSpec) -> None:
    assert spec.stat is not None
    before = EngineStats(num_blocks=10, step_phase_seconds_total={"plan": 1.0}, requests_total={"stop": 1})
    changed: dict[str, Any] = {
        "kv_usage": {"num_used_blocks": 5},
        "step_phase_seconds_total": {"step_phase_seconds_total": {"plan": 2.0}},
        "requests_total": {"requests_total": {"stop": 2}},
    }
    change = changed[spec.stat] if spec.stat in changed else {spec.stat: getattr(before, spec.stat) + 1}
    old = samples(expose_engine(before, replica="0"))
    new = samples(expose_engine(replace(before, **change), replica="0"))
    moved = {name for (name, labels), value in new.items() if old[name, labels] != value}
    assert spec.name in moved
    assert moved <= {spec.name, "pitstop_kv_usage_ratio", "pitstop_kv_blocks_used"}


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
    recorder.observe("pitstop_replica_first_token_seconds", "0", value=0.02)
    recorder.count("pitstop_heartbeat_failures_total", "0")
    recorder.count("pitstop_heartbeat_failures_total", "0")
    found = samples(recorder.expose())
    assert found["pitstop_heartbeat_failures_total", (("replica", "0"),)] == 2
    assert found["pitstop_replica_first_token_seconds_count", (("replica", "0"),)] == 1
    assert found["pitstop_replica_first_token_seconds_bucket", (("le", "0.01"), ("replica", "0"))] == 0
    assert not any(name.endswith("_created") for name, _ in found)


def test_routers_stay_apart_on_one_page() -> None:
    pages = []
    for rank, count in (("0", 3), ("1", 4)):
        recorder = Recorder(ROUTER_METRICS, constant={"router": rank})
        recorder.count("pitstop_refusals_total", "queue_full", amount=count)
        recorder.set_gauge("pitstop_http_requests_in_flight", value=count)
        pages.append(recorder.expose())
    found = samples(merge_expositions([pages[0], *pages]))
    assert found["pitstop_refusals_total", (("code", "queue_full"), ("router", "0"))] == 3
    assert found["pitstop_refusals_total", (("code", "queue_full"), ("router", "1"))] == 4
    assert found["pitstop_http_requests_in_flight", (("router", "1"),)] == 4


def test_buckets_are_as_configured_and_every_kind_can_be() -> None:
    assert set(BUCKETS) == set(BUCKET_NAMES)
    settings = parse_settings({"metrics": {"buckets": {"token_latency": [0.5, 1.5]}}}).metrics
    recorder = Recorder(REPLICA_METRICS, buckets=settings.buckets)
    recorder.observe("pitstop_inter_token_seconds", "0", value=1.0)
    recorder.observe("pitstop_replica_generation_seconds", "0", value=1.0)
    found = samples(recorder.expose())
    bounds = {dict(labels)["le"] for name, labels in found if name == "pitstop_inter_token_seconds_bucket"}
    assert bounds == {"0.5", "1.5", "+Inf"}
    assert found["pitstop_replica_generation_seconds_bucket", (("le", "0.005"), ("replica", "0"))] == 0


@pytest.mark.parametrize(
    ("buckets", "sentence"),
    [
        ({"pause": [2, 1]}, "must be positive and ascending"),
        ({"pause": []}, "must be positive and ascending"),
        ({"latencies": [1]}, "metrics.buckets.latencies is not a setting"),
    ],
)
def test_buckets_that_are_none_are_refused(buckets: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_settings({"metrics": {"buckets": buckets}})


def test_aliases_repeat_the_numbers_under_the_names_of_vllm() -> None:
    recorder = Recorder(ROUTER_METRICS, constant={"router": "1"})
    recorder.observe("pitstop_time_to_first_token_seconds", value=0.02)
    stats = replace(STATS, num_blocks=512, page_size=16)
    page = with_aliases(merge_expositions([expose_engine(stats, replica="0"), recorder.expose()]), model='a "b"')
    found = samples(page)
    labels = (("engine", "0"), ("model_name", 'a "b"'))
    assert found["vllm:num_requests_waiting", labels] == 3
    assert found["vllm:request_success_total", (labels[0], ("finished_reason", "stop"), labels[1])] == 2
    router = ("router", "1")
    assert found["vllm:time_to_first_token_seconds_count", (labels[1], router)] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", (("le", "0.025"), labels[1], router)] == 1
    size = (("block_size", "16"), labels[0], labels[1], ("num_gpu_blocks", "512"))
    assert found["vllm:cache_config_info", size] == 1
    assert found["pitstop_requests_waiting", (("replica", "0"),)] == 3


def test_what_waits_is_what_is_in_line_and_what_replicas_have_and_nobody_counts_twice() -> None:
    recorder = Recorder(ROUTER_METRICS, constant={"router": "0"})
    recorder.set_gauge("pitstop_requests_in_line", value=48)
    recorder.set_gauge("pitstop_requests_waiting_at_router", value=62)
    engines = [expose_engine(replace(STATS, num_waiting=waiting), replica=str(waiting)) for waiting in (6, 8)]
    page = with_aliases(merge_expositions([*engines, recorder.expose()]), model="m")
    waiting = {key: value for key, value in samples(page).items() if key[0] == "vllm:num_requests_waiting"}
    assert sum(waiting.values()) == 62
    assert len(waiting) == 3
    assert page.count("# TYPE vllm:num_requests_waiting gauge") == 1


@pytest.mark.parametrize("alias", ["vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"])
def test_what_clients_wait_for_is_measured_where_they_arrive(alias: str) -> None:
    assert [spec in ROUTER_METRICS for spec in METRICS if alias in spec.aliases] == [True]


def test_every_alias_keeps_its_kind_and_the_parts_of_one_are_of_one_kind() -> None:
    aliases = {alias for spec in METRICS for alias in spec.aliases}
    assert len(aliases) > 15
    for alias in aliases:
        parts = [spec for spec in METRICS if alias in spec.aliases]
        assert len({(spec.kind, spec.buckets) for spec in parts}) == 1
        # Series of one name are told apart by their labels.
        assert len({(spec in ROUTER_METRICS, spec.labels) for spec in parts}) == len(parts)
    for spec in METRICS:
        for alias in spec.aliases:
            assert alias.endswith("_total") == (spec.kind == "counter")


def test_two_recorders_do_not_share_numbers() -> None:
    first, second = Recorder(CONTROLLER_METRICS), Recorder(CONTROLLER_METRICS)
    first.count("pitstop_swaps_total", "committed")
    assert ("pitstop_swaps_total", (("outcome", "committed"),)) not in samples(second.expose())
