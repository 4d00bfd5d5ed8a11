"""Each parameter of ContinuousBatchingConfig does what it says, or is refused by name: none is decoration."""

from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
from engine_runs import (
    DEADLINE_S,
    StepGate,
    greedy,
    prompt_of,
    result_of,
    run_all,
    running,
    small_config,
    wait_until,
)
from tiny_models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

from engine import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    FinishReason,
    InvalidRequest,
    QueueFull,
    SamplingParams,
    WorkloadHints,
    init_continuous_batching,
)
from engine.host_memory import free_host_bytes
from engine.model_runner import probe_layers
from engine.sizing import resolve_config

NUM_NEW = 12
PROMPTS = [prompt_of(length, seed=6) for length in (5, 40, 70)]

TRIED_HERE = {
    *("page_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch"),
    *("allow_block_sharing", "scheduler_type", "safety_margin", "return_logprobs", "seed", "cpu_offload_space"),
    *("cpu_offload_space_safety_threshold", "max_queue_size", "per_request_processors", "block_size"),
    "use_async_batching",
}
TRIED_ELSEWHERE = {
    "auto_switch_to_flash": "test_flash",
    "pack_weights": "test_packed_weights",
    "max_blocks_per_request": "test_flash",
    "use_cuda_graph": "test_graphs",
    "q_padding_interval_size": "test_graphs",
    "kv_padding_interval_size": "test_graphs",
    "drop_unsupported_processors": "with the logits processors",
    "disable_nccl_graph_mixing": "test_parallel",
    "cpu_group_timeout": "with tensor parallelism",
    "use_default_compile_configs": "test_compilation",
    "varlen_compile_config": "test_compilation",
    "decode_compile_config": "test_compilation",
    "default_compile_level": "test_compilation",
    "max_cached_graphs": "test_surface: a deprecated limit without a meaning",
}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@cache
def answers() -> list[list[int]]:
    return [greedy(tiny_model(), prompt, NUM_NEW) for prompt in PROMPTS]


def test_every_parameter_is_tried() -> None:
    names = {field.name for field in fields(ContinuousBatchingConfig)}  # type: ignore[arg-type]  # pydantic's is one too
    assert TRIED_HERE | set(TRIED_ELSEWHERE) == names


@pytest.mark.parametrize(
    "values",
    [
        {"use_cuda_graph": False, "max_blocks_per_request": 0},
        {"use_cuda_graph": (False, False)},
        {"auto_switch_to_flash": False, "disable_nccl_graph_mixing": False, "cpu_group_timeout": None},
    ],
    ids=repr,
)
def test_declining_what_is_not_available_changes_nothing(values: dict[str, Any], model: PreTrainedModel) -> None:
    expected = answers()
    with running(model, **values) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == expected


@pytest.mark.parametrize(("wanted", "num_in_flight"), [(True, 2), (False, 1), (None, 1)])
def test_async_batching_launches_a_step_before_the_one_in_flight_has_ended(
    wanted: bool | None, num_in_flight: int, model: PreTrainedModel
) -> None:
    expected = answers()
    with running(model, use_async_batching=wanted) as manager:
        gate = StepGate(model)
        ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in PROMPTS]
        gate.wait()
        if num_in_flight > 1:
            wait_until(lambda: len(manager._loop._in_flight) == num_in_flight)
        gate.step()
        assert len(manager._loop._in_flight) <= num_in_flight
        gate.open()
        assert [result_of(manager, request_id).generated_tokens for request_id in ids] == expected


def test_async_batching_is_refused_where_the_model_is_cut_over_ranks(model: PreTrainedModel) -> None:
    layers = probe_layers(model)
    with pytest.raises(InvalidRequest, match="tensor parallel") as caught:
        resolve_config(small_config(use_async_batching=True), model, layers, is_cut=True)
    assert caught.value.param == "use_async_batching"
    assert resolve_config(small_config(), model, layers, is_cut=True).steps_in_flight == 1


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_page_size_is_the_unit_of_the_prefix_cache(page_size: int, model: PreTrainedModel) -> None:
    expected = answers()
    with running(model, page_size=page_size, num_blocks=1024 // page_size) as manager:
        for is_second in (False, True):
            output = result_of(manager, manager.add_request(PROMPTS[2], max_new_tokens=NUM_NEW))
            assert output.generated_tokens == expected[2]
            assert output.num_cached_tokens == (69 // page_size * page_size if is_second else 0)
        assert manager.stats().page_size == page_size


@pytest.mark.filterwarnings("ignore:block_size is deprecated:FutureWarning")
def test_block_size_is_the_deprecated_name_of_page_size(model: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(block_size=32, num_blocks=8)
    assert init_continuous_batching(model, continuous_batching_config=config).config.page_size == 32


@pytest.mark.filterwarnings("ignore:block_size is deprecated:FutureWarning")
def test_two_names_with_two_sizes_of_a_page_are_refused() -> None:
    for page_size in (16, 256):
        with pytest.raises(ValueError, match=f"block_size is 8, .* page_size, which is {page_size}"):
            ContinuousBatchingConfig(block_size=8, page_size=page_size)
    assert ContinuousBatchingConfig(block_size=8, page_size=8).tokens_per_block == 8


def test_num_blocks_is_the_size_of_the_cache(model: PreTrainedModel) -> None:
    with running(model, num_blocks=6) as manager:
        assert (manager.stats().num_blocks, manager.config.max_model_len) == (6, 96)
        run_all(manager, [PROMPTS[2]] * 3, NUM_NEW)
        assert manager.stats().preemptions_total > 0


def test_max_memory_percent_sizes_the_cache_of_a_manager(model: PreTrainedModel) -> None:
    sizes = []
    for mib in (16, 32):
        percent = mib * 2**20 / free_host_bytes()
        config = ContinuousBatchingConfig(page_size=16, max_memory_percent=percent, max_batch_tokens=100)
        sizes.append(init_continuous_batching(model, continuous_batching_config=config).config.num_blocks)
    assert 0 < sizes[0] < sizes[1]


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 64])
@pytest.mark.usefixtures("depth")
def test_max_batch_tokens_bounds_every_step(max_batch_tokens: int, model: PreTrainedModel) -> None:
    expected, sizes = answers(), []
    with running(model, max_batch_tokens=max_batch_tokens) as manager:
        hook = model.register_forward_pre_hook(
            lambda _module, _args, keywords: sizes.append(keywords["input_ids"].numel()), with_kwargs=True
        )
        assert run_all(manager, PROMPTS, NUM_NEW) == expected
        hook.remove()
    assert max(sizes) == max_batch_tokens


def rows_of_each_step(manager: ContinuousBatchingManager, gate: StepGate, num_steps: int) -> list[int]:
    rows = []
    for _ in range(num_steps):
        gate.step()
        rows.append(manager.stats().num_running)
    return rows


def test_max_requests_per_batch_bounds_those_that_run(model: PreTrainedModel) -> None:
    with running(model, max_requests_per_batch=2) as manager:
        gate = StepGate(model)
        ids = manager.add_requests([[1, 2], [3, 4], [5, 6]], max_new_tokens=4)
        gate.wait()
        assert max(rows_of_each_step(manager, gate, 3)) == 2
        gate.open()
        for request_id in ids:
            result_of(manager, request_id)


def test_the_hints_of_a_workload_bound_requests_and_blocks(model: PreTrainedModel) -> None:
    hints = WorkloadHints(max_prompt_length=30, max_generated_length=10, num_requests=3)
    config = ContinuousBatchingConfig(page_size=16)
    resolved = init_continuous_batching(model, None, config, hints).config
    assert (resolved.max_requests_per_batch, resolved.num_blocks) == (3, 9)


@pytest.mark.parametrize("allowed", [True, False])
def test_allow_block_sharing_decides_on_prefix_hits(allowed: bool, model: PreTrainedModel) -> None:
    with running(model, allow_block_sharing=allowed) as manager:
        run_all(manager, [PROMPTS[2]] * 2, NUM_NEW)
        output = result_of(manager, manager.add_request(PROMPTS[2], max_new_tokens=1))
        assert output.num_cached_tokens == (64 if allowed else 0)
        assert (manager.stats().num_cached_blocks > 0) == allowed


@pytest.fixture(params=["fifo", "prefill_first", "priority", "fair"])
def scheduler_type(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.usefixtures("depth")
def test_every_scheduler_gives_the_same_tokens(scheduler_type: str, model: PreTrainedModel) -> None:
    expected = answers()
    with running(model, scheduler_type=scheduler_type, num_blocks=12, max_batch_tokens=40) as manager:
        assert run_all(manager, PROMPTS * 4, NUM_NEW) == expected * 4


def test_the_scheduler_type_decides_who_goes_first(scheduler_type: str, model: PreTrainedModel) -> None:
    with running(model, scheduler_type=scheduler_type, max_requests_per_batch=1) as manager:
        hints = [("a", 0), ("a", 0), ("a", 5), ("b", 1), ("b", -1)]
        with manager.pause(weights_changed=False):  # so that they all come before the first is taken up
            ids = [
                manager.add_request([1, 2, at], max_new_tokens=1, hints=WorkloadHints(tenant=tenant, priority=priority))
                for at, (tenant, priority) in enumerate(hints)
            ]
        results = {request_id: result_of(manager, request_id) for request_id in ids}
    order = sorted(range(5), key=lambda number: results[ids[number]].lifespan)
    expected = {"priority": [4, 0, 1, 3, 2], "fair": [0, 3, 1, 4, 2]}
    assert order == expected.get(scheduler_type, [0, 1, 2, 3, 4])


@pytest.mark.parametrize(("safety_margin", "num_together"), [(0.0, 2), (0.5, 1)])
def test_the_safety_margin_keeps_blocks_from_new_requests(
    safety_margin: float, num_together: int, model: PreTrainedModel
) -> None:
    with running(model, num_blocks=8, safety_margin=safety_margin) as manager:
        gate = StepGate(model)
        with manager.pause(weights_changed=False):  # so that the first is not taken up alone
            ids = manager.add_requests([prompt_of(33, seed=1), prompt_of(33, seed=2)], max_new_tokens=3)
        gate.wait()
        gate.step()
        assert manager.stats().num_running == num_together
        gate.open()
        for request_id in ids:
            result_of(manager, request_id)


@pytest.mark.parametrize("wanted", [True, False])
def test_return_logprobs_is_the_default_of_requests(wanted: bool, model: PreTrainedModel) -> None:
    with running(model, return_logprobs=wanted) as manager:
        plain = result_of(manager, manager.add_request([1, 2], max_new_tokens=3))
        other = SamplingParams(logprobs=not wanted, max_new_tokens=3)
        opposite = result_of(manager, manager.add_request([1, 2], sampling=other))
    assert (len(plain.logprobs), len(opposite.logprobs)) == ((3, 0) if wanted else (0, 3))


def test_seed_repeats_a_manager_and_leaves_the_generator_of_torch_alone(model: PreTrainedModel) -> None:
    warm = GenerationConfig(do_sample=True, temperature=1.5, max_new_tokens=NUM_NEW)
    torch.manual_seed(17)
    before, runs = torch.get_rng_state(), []
    for seed, others in ((3, 0), (3, 3), (4, 0), (None, 0)):
        with running(model, generation_config=warm, seed=seed, num_blocks=12) as manager:
            ids = [manager.add_request(prompt) for prompt in PROMPTS]
            # Whoever comes later takes a seed of their own, and crowds the others out of the cache.
            ids += manager.add_requests(PROMPTS * others)
            outputs = [list(result_of(manager, request_id).generated_tokens) for request_id in ids]
            runs.append(outputs[: len(PROMPTS)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[3] not in runs[:3]
    assert torch.equal(torch.get_rng_state(), before)


def test_max_queue_size_refuses_at_once_and_says_how_many_wait(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config(max_queue_size=3))
    ids = [manager.add_request([1, 2], max_new_tokens=2) for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests wait") as caught:  # not started, so waiting would be for ever
        manager.add_request([1, 2], max_new_tokens=2)
    assert caught.value.num_waiting == 3
    manager.start()
    for request_id in ids:
        assert result_of(manager, request_id).finish_reason is FinishReason.LENGTH
    assert len(run_all(manager, [[1, 2]], 2)) == 1
    manager.stop(timeout=DEADLINE_S)


def test_a_request_of_several_sequences_waits_as_so_many(model: PreTrainedModel) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config(max_queue_size=5))
    manager.add_request([1, 2], sampling=SamplingParams(num_return_sequences=4, max_new_tokens=1))
    manager.add_request([1, 2], max_new_tokens=1)
    with pytest.raises(QueueFull) as caught:
        manager.add_request([1, 2], max_new_tokens=1)
    assert caught.value.num_waiting == 5


@pytest.mark.parametrize("allowed", [True, False])
def test_per_request_processors_opens_the_keywords(allowed: bool, model: PreTrainedModel) -> None:
    with running(model, per_request_processors=allowed) as manager:
        if allowed:
            request_id = manager.add_request([1, 2], max_new_tokens=3, temperature=0.7, top_k=5, top_p=0.9)
            assert len(result_of(manager, request_id).generated_tokens) == 3
        else:
            with pytest.raises(InvalidRequest, match="per_request_processors"):
                manager.add_request([1, 2], max_new_tokens=3, temperature=0.7)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "deepseek_v3"])
@pytest.mark.usefixtures("depth")
def test_evicted_prefixes_come_back_exactly_from_the_host(family: str) -> None:
    model = tiny_model(family)
    prompts = [prompt_of(70, seed=seed) for seed in range(6)]
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    with running(model, num_blocks=8, cpu_offload_space=0.01) as manager:
        for round_number in range(2):
            for prompt, answer in zip(prompts, expected, strict=True):
                output = result_of(manager, manager.add_request(prompt, max_new_tokens=NUM_NEW))
                assert output.generated_tokens == answer
                if round_number:
                    assert output.num_cached_tokens == 64
        assert manager.stats().num_host_blocks > 8
    with running(model, num_blocks=8, cpu_offload_space=0.0) as manager:
        run_all(manager, prompts, NUM_NEW)
        output = result_of(manager, manager.add_request(prompts[0], max_new_tokens=NUM_NEW))
        assert output.generated_tokens == expected[0]
        assert (output.num_cached_tokens < 64) or len(manager.config.windows) > 1
        assert manager.stats().num_host_blocks == 0


@pytest.mark.usefixtures("depth")
def test_requests_that_give_way_come_back_from_the_host(model: PreTrainedModel) -> None:
    prompts = [prompt_of(40, seed=seed) for seed in range(8)]
    expected = [greedy(model, prompt, 40) for prompt in prompts]
    with running(model, num_blocks=12, cpu_offload_space=0.01, safety_margin=0.0) as manager:
        assert run_all(manager, prompts, 40) == expected
        assert manager.stats().preemptions_total > 0
        assert manager.stats().num_host_blocks > 0


def test_the_threshold_of_the_host_tier_bounds_it(model: PreTrainedModel) -> None:
    slots = []
    for threshold in (0.8, 1e-6):
        config = small_config(cpu_offload_space=0.01, cpu_offload_space_safety_threshold=threshold)
        slots.append(init_continuous_batching(model, continuous_batching_config=config).config.num_host_slots)
    assert slots[0] == int(0.01 * 2**30) // (16 * 2 * 2 * 2 * 16 * 4)
    assert 0 < slots[1] < 10
