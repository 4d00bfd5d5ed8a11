"""The load that routing and autoscaling are told: tokens left, what steps take, and silence while nothing changes."""

from dataclasses import replace

import pytest

from engine import EngineStats, SamplingParams
from serve_app.load_meter import Load, LoadMeter
from serve_app.messages import GenerateRequest
from serve_app.routing.fleet_table import FleetTable
from serve_app.settings import AutoscalingSettings
from serve_app.streams import TokenStream

SETTINGS = AutoscalingSettings(
    assumed_prefill_tokens_per_s=500, assumed_decode_tokens_per_s=50, target_token_time_s=0.1
)
MEASURED = EngineStats(
    fixed_step_s=0.02,
    request_step_s=0.002,
    token_step_s=0.001,
    max_step_tokens=200,
    max_running=8,
    num_blocks=100,
    num_used_blocks=40,
    page_size=16,
    num_running=2,
    weight_version=3,
)


def stream(prompt: int, limit: int, number: int = 1) -> TokenStream:
    sampling = SamplingParams(max_new_tokens=limit, num_return_sequences=number)
    return TokenStream(GenerateRequest("r", [1] * prompt, sampling), replica_id="a")


def test_a_request_counts_before_the_engine_has_seen_it() -> None:
    load = LoadMeter(SETTINGS).load(EngineStats(queued_prefill_tokens=7, last_step_s=10.0), [stream(100, 20, 3)])
    assert load == Load(prefill_tokens=107, decode_tokens=60, num_requests=3)


def test_a_prompt_that_the_engine_counts_is_not_counted_twice() -> None:
    old = stream(100, 20)
    old.arrived_at -= 1.0
    load = LoadMeter(SETTINGS).load(EngineStats(queued_prefill_tokens=100), [old])
    assert load.prefill_tokens == 100


def test_work_is_what_the_steps_take_with_as_many_requests_at_once_as_stay_quick() -> None:
    meter = LoadMeter(SETTINGS)
    assert meter.work_s(Load(1000, 100), EngineStats()) == pytest.approx(2.0 + 2.0)
    assert meter.work_s(Load(1000, 100), MEASURED) == pytest.approx(1000 * 0.0011 + 100 * (0.002 + 0.02 / 8))
    slow = replace(MEASURED, fixed_step_s=0.5)
    assert meter.work_s(Load(0, 100), slow) == pytest.approx(100 * 0.502), "one at a time is all that is left"
    alone = replace(MEASURED, request_step_s=0.04)
    assert meter.work_s(Load(0, 100), alone) == pytest.approx(100 * (0.04 + 0.02 / 2))


def test_what_arrived_adds_up_and_stays_when_requests_end() -> None:
    meter = LoadMeter(SETTINGS)
    for _ in range(3):
        meter.note_arrival(stream(100, 20), MEASURED)
    stats = meter.autoscaling_stats(Load(), MEASURED)
    assert stats["arrived_s"] == pytest.approx(3 * meter.work_s(Load(100, 20), MEASURED))
    assert stats["work_s"] == 0
    assert stats["kv_usage"] == pytest.approx(0.4)
    assert all(type(value) is float for value in stats.values())


def test_routers_understand_the_report() -> None:
    meter, table = LoadMeter(SETTINGS), FleetTable()
    told = meter.routing_stats(Load(50, 60, 5), MEASURED, prefixes=[b"0123456789abcdef"])
    table.report("a", told)
    assert table.versions[table.row_of("a")] == 3
    assert (told["num_running"], told["num_waiting"], told["free_tokens"]) == (2, 3, 60 * 16)
    assert told["prefixes"] == b"0123"


def test_an_idle_replica_repeats_itself_exactly() -> None:
    meter = LoadMeter(SETTINGS)
    idle = replace(MEASURED, fixed_step_s=0.0123456)
    first = meter.routing_stats(Load(), idle)
    assert first["step_s"] == 0.0123
    assert meter.routing_stats(Load(), replace(idle, fixed_step_s=0.0123357)) == first
    reported_at = first["reported_at"]
    for change in ({"is_fenced": True}, {"is_avoided": True}, {"prefixes": [b"abcd"]}):
        changed = meter.routing_stats(Load(), idle, **change)  # type: ignore[arg-type]
        assert changed["reported_at"] > reported_at
        reported_at = changed["reported_at"]
    assert meter.routing_stats(Load(), replace(idle, weight_version=4))["reported_at"] > reported_at
