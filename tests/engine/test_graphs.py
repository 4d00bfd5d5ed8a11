"""Padding, static tensors and replays, over graphs that compute on the CPU what captured ones compute on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import greedy, prompt_of, result_of, run_all, running, small_config
from fake_graphs import FakeGraphs
from flash_reference import KERNELS
from tiny_models import tiny_model
from transformers import PreTrainedModel

from engine import ContinuousBatchingManager, InvalidRequest, SamplingParams, stage_weights

NUM_NEW = 12
PROMPTS = [prompt_of(length, seed=6) for length in (1, 5, 40, 70)]


def tools(graphs: FakeGraphs) -> dict[str, Any]:
    return {"flash": KERNELS, "graphs": graphs}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("llama", {"q_padding_interval_size": 8, "kv_padding_interval_size": 32}),
        ("llama", {"max_batch_tokens": 24, "max_blocks_per_request": 3}),
        ("llama", {"num_blocks": 8, "safety_margin": 0.0, "max_requests_per_batch": 3}),
        ("gemma3", {"q_padding_interval_size": 8}),
        ("qwen3_moe", {}),
        ("gpt2", {}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("depth")
def test_replayed_steps_give_the_tokens_of_plain_generate(family: str, values: dict[str, Any]) -> None:
    model, graphs = tiny_model(family), FakeGraphs()
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with running(model, tools=tools(graphs), **values) as manager:
        assert [run_all(manager, PROMPTS, NUM_NEW) for _ in range(3)] == [answers] * 3
        assert manager._runner._graphs._uses_packed
    assert graphs.num_replays > 20


@pytest.mark.parametrize(("packed", "decode"), [(True, False), (False, True)])
def test_each_way_is_captured_only_where_it_was_asked_for(packed: bool, decode: bool) -> None:
    model, graphs = tiny_model(), FakeGraphs()
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with running(model, tools=tools(graphs), use_cuda_graph=(packed, decode)) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers
        shapes = manager._runner._graphs._graphs
    assert {shape.num_decoding > 0 for shape in shapes} == {decode}


def test_padding_never_touches_a_block_of_the_pool_and_leaves_no_logits() -> None:
    model, graphs = tiny_model(), FakeGraphs()
    with running(model, tools=tools(graphs), num_blocks=8) as manager:
        cache = manager._runner._cache
        for store in (*cache._keys_HNCD, *cache._values_HNCD):
            store.narrow(1, 0, 8 * cache.chunks_per_block).fill_(float("nan"))
        assert run_all(manager, [PROMPTS[1]], NUM_NEW) == [greedy(tiny_model(), PROMPTS[1], NUM_NEW)]
        for store in (*cache._keys_HNCD, *cache._values_HNCD):
            in_pool = store.narrow(1, 0, 8 * cache.chunks_per_block)
            # 5 tokens of the prompt and 11 of the answer were written, and the last is never computed.
            assert (~in_pool.isnan()).any(-1).any(0).sum() == 5 + NUM_NEW - 1
            assert not cache._block(store, 8).isnan().any()


@pytest.mark.usefixtures("depth")
def test_a_prompt_and_rows_that_decode_share_a_replayed_step() -> None:
    model, graphs = tiny_model(), FakeGraphs()
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with running(model, tools=tools(graphs), max_batch_tokens=16) as manager:
        for _ in range(2):
            with manager.pause(weights_changed=False):
                ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in PROMPTS]
            assert [result_of(manager, request_id).generated_tokens for request_id in ids] == answers


@pytest.mark.usefixtures("depth")
def test_seeded_samples_do_not_depend_on_graphs() -> None:
    sampling = SamplingParams(temperature=1.5, seed=3, max_new_tokens=NUM_NEW, logprobs=True)
    runs = []
    for kwargs in ({"flash": KERNELS}, tools(FakeGraphs())):
        with running(tiny_model(), tools=kwargs) as manager:
            outputs = [result_of(manager, manager.add_request(prompt, sampling=sampling)) for prompt in PROMPTS]
            runs.append([(output.generated_tokens, pytest.approx(output.logprobs, abs=1e-4)) for output in outputs])
    assert [tokens for tokens, _ in runs[0]] == [tokens for tokens, _ in runs[1]]


def test_warming_up_captures_the_largest_mixed_step_and_decode_steps() -> None:
    model, graphs = tiny_model(), FakeGraphs()
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    config = small_config(max_requests_per_batch=200, max_batch_tokens=512)
    manager = ContinuousBatchingManager(model, None, config, **tools(graphs))
    manager.warmup()
    assert [shape[0] for shape in graphs.captured] == [256, 64, 128, 200]
    manager.start()
    manager.warmup()  # beside the loop, in a pause; there is nothing more to capture
    assert len(graphs.captured) == 4
    assert run_all(manager, PROMPTS, NUM_NEW) == answers
    manager.destroy()


def test_a_model_that_cannot_be_captured_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model, graphs = tiny_model(), FakeGraphs(error=RuntimeError("operation not permitted when stream is capturing"))
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with running(model, tools=tools(graphs)) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == answers
    warnings = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert len(warnings) == 1
    assert "stream is capturing" in warnings[0]


@pytest.mark.parametrize(
    "values",
    [
        {"use_cuda_graph": True},
        {"use_cuda_graph": (False, True)},
        {"q_padding_interval_size": 64},
        {"kv_padding_interval_size": 1024},
    ],
    ids=repr,
)
def test_graphs_on_a_device_without_them_are_refused_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(InvalidRequest, match=f"{name}=.* the device is cpu; leave it at its default") as caught:
        ContinuousBatchingManager(tiny_model(), None, small_config(**values))
    assert caught.value.param == name
    with pytest.raises(InvalidRequest, match=f"{name}=.* the model has attention sinks"):
        ContinuousBatchingManager(tiny_model("gpt_oss"), None, small_config(**values), **tools(FakeGraphs()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_cuda_graph": False, "q_padding_interval_size": 8}, "q_padding_interval_size pads the CUDA graphs"),
        ({"use_cuda_graph": (True, True), "max_blocks_per_request": 0}, "max_blocks_per_request=0 closes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ContinuousBatchingManager(tiny_model(), None, small_config(**values), **tools(FakeGraphs()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (True, True)),
        ({"use_cuda_graph": False}, (False, False)),
        ({"use_cuda_graph": True, "max_blocks_per_request": 0}, (True, False)),
        ({"use_cuda_graph": (False, True)}, (False, True)),
        ({"q_padding_interval_size": 8}, (True, True)),
    ],
    ids=repr,
)
def test_what_none_and_the_pair_come_to(values: dict[str, Any], expected: tuple[bool, bool]) -> None:
    manager = ContinuousBatchingManager(tiny_model(), None, small_config(**values), **tools(FakeGraphs()))
    assert manager.config.use_cuda_graph == expected
    without = ContinuousBatchingManager(tiny_model(), None, small_config())
    assert without.config.use_cuda_graph == (False, False)


@pytest.fixture
def other_weights(tmp_path: Path) -> tuple[PreTrainedModel, str]:
    other = tiny_model(seed=1)
    other.save_pretrained(tmp_path)
    return other, str(tmp_path)


def test_a_swap_under_graphs_keeps_the_weights_where_they_are(other_weights: tuple[PreTrainedModel, str]) -> None:
    model, graphs = tiny_model(), FakeGraphs()
    other, folder = other_weights
    old, new = ([greedy(owner, prompt, NUM_NEW) for prompt in PROMPTS] for owner in (model, other))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with running(model, tools=tools(graphs)) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == old
        staged = stage_weights(model, folder)
        manager.commit_weights(staged)
        num_captured = len(graphs.captured)
        assert run_all(manager, PROMPTS, NUM_NEW) == new
        with manager.pause():
            staged.rollback()
        assert run_all(manager, PROMPTS, NUM_NEW) == old
        assert len(graphs.captured) == num_captured
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_weights_that_moved_in_memory_are_captured_anew(caplog: pytest.LogCaptureFixture) -> None:
    model, graphs, other = tiny_model(), FakeGraphs(), tiny_model(seed=1)
    expected = greedy(other, PROMPTS[1], NUM_NEW)
    with running(model, tools=tools(graphs)) as manager:
        run_all(manager, PROMPTS[1:2], NUM_NEW)
        num_captured = len(graphs.captured)
        with manager.pause():
            for parameter, moved in zip(model.parameters(), other.parameters(), strict=True):
                parameter.data = moved.data.clone()
        assert run_all(manager, PROMPTS[1:2], NUM_NEW) == [expected]
    assert len(graphs.captured) == 2 * num_captured
    assert "weights moved in memory" in caplog.text


def test_graphs_live_as_long_as_their_cache() -> None:
    model, graphs = tiny_model(), FakeGraphs()
    answer = greedy(model, PROMPTS[1], NUM_NEW)
    manager = ContinuousBatchingManager(model, None, small_config(), **tools(graphs))
    for _ in range(2):
        manager.start()
        assert run_all(manager, PROMPTS[1:2], NUM_NEW) == [answer]
        manager.stop()
    assert len(graphs.captured) % 2 == 0
    assert torch.Size([64, 256]) in graphs.captured
