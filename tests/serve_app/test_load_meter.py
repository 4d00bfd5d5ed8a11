"""The load that routing and autoscaling are told: tokens left, best speeds, and silence while nothing changes."""

import pytest

from engine import EngineStats, SamplingParams
from serve_app.load_meter import Load, LoadMeter
from serve_app.messages import GenerateRequest
from serve_app.settings import AutoscalingSettings
from serve_app.streams import TokenStream

SETTINGS = AutoscalingSettings(assumed_prefill_tokens_per_s=500, assumed_decode_tokens_per_s=50)


def stream(prompt: int, limit: int) -> TokenStream:
    return TokenStream(GenerateRequest("r", [1] * prompt, SamplingParams(max_new_tokens=limit)), replica_id="a")


def test_a_request_counts_before_the_engine_has_seen_it() -> None:
    load = LoadMeter(SETTINGS).load(EngineStats(queued_prefill_tokens=7, last_step_s=10.0), [stream(100, 20)])
    assert (load.prefill_tokens, load.decode_tokens) == (107, 20)


def test_a_prompt_that_the_engine_counts_is_not_counted_twice() -> None:
    old = stream(100, 20)
    old.arrived_at -= 1.0
    load = LoadMeter(SETTINGS).load(EngineStats(queued_prefill_tokens=100), [old])
    assert load.prefill_tokens == 100


def test_the_best_speed_is_kept_and_fades() -> None:
    meter = LoadMeter(SETTINGS)
    meter.load(EngineStats(decode_tokens_per_s=100.0), [])
    assert meter.load(EngineStats(decode_tokens_per_s=10.0), []).decode_tokens_per_s == 100.0
    for _ in range(500):
        meter.decay()
    assert meter.load(EngineStats(decode_tokens_per_s=10.0), []).decode_tokens_per_s == 10.0


def test_work_is_tokens_over_speed_and_unmeasured_speeds_are_assumed() -> None:
    meter = LoadMeter(SETTINGS)
    assert meter.work_s(Load(1000, 100)) == pytest.approx(2.0 + 2.0)
    assert meter.work_s(Load(1000, 100, 1000.0, 200.0)) == pytest.approx(1.0 + 0.5)


def test_an_idle_replica_repeats_itself_exactly() -> None:
    meter = LoadMeter(SETTINGS)
    idle = Load(0, 0, 123.456, 78.9)
    first = meter.routing_stats(idle, is_fenced=False, weight_version=1)
    assert meter.routing_stats(idle, is_fenced=False, weight_version=1) == first
    fenced = meter.routing_stats(idle, is_fenced=True, weight_version=1)
    assert fenced["reported_at"] > first["reported_at"]
    swapped = meter.routing_stats(idle, is_fenced=True, weight_version=2)
    assert (swapped["weight_version"], swapped["reported_at"] > fenced["reported_at"]) == (2, True)
    assert meter.routing_stats(Load(5, 0), is_fenced=True, weight_version=2)["prefill_tokens"] == 5
