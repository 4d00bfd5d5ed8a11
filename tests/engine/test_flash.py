"""The flash backend over kernels that compute on the CPU what flash-attn computes on a GPU."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_runs import greedy, prompt_of, result_of, run_all, running, small_config
from flash_reference import KERNELS, Calls, counting
from tiny_models import tiny_model

from engine import ContinuousBatchingManager, InvalidRequest, SamplingParams, WorkloadHints
from engine.attention.flash import FlashKernels, find_flash, objection_to_flash
from engine.kv_cache import LayerShape

NUM_NEW = 12
SYSTEM_PROMPT = prompt_of(34, seed=4)
PROMPTS = [prompt_of(1, seed=4), prompt_of(50, seed=4), *(SYSTEM_PROMPT + prompt_of(n, seed=4) for n in (1, 20))]
FLASH = {"flash": KERNELS}


@pytest.mark.parametrize(
    ("family", "max_blocks"),
    [
        *((family, None) for family in ("llama", "gpt2", "mistral", "gemma2", "gemma3", "cohere2", "qwen3_moe")),
        *((family, number) for family in ("llama", "gemma3") for number in (0, 2)),
    ],
)
def test_greedy_tokens_equal_plain_generate(family: str, max_blocks: int | None) -> None:
    model = tiny_model(family)
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    for sharing in (True, False):
        # 48 tokens a step cut the longer prompts into chunks.
        values = {"allow_block_sharing": sharing, "max_batch_tokens": 48, "max_blocks_per_request": max_blocks}
        with running(model, tools=FLASH, **values) as manager:
            assert [run_all(manager, PROMPTS, NUM_NEW) for _ in range(2)] == [answers] * 2
            assert (manager.stats().cached_tokens_total > 0) == sharing


@pytest.mark.parametrize("values", [{"num_blocks": 8}, {"num_blocks": 8, "cpu_offload_space": 0.01}], ids=repr)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.usefixtures("depth")
def test_requests_that_give_way_answer_the_same(family: str, values: dict[str, Any]) -> None:
    model = tiny_model(family)
    prompts = [prompt_of(40, seed=seed) for seed in range(6)]
    answers = [greedy(model, prompt, 40) for prompt in prompts]
    with running(model, tools=FLASH, safety_margin=0.0, **values) as manager:
        assert run_all(manager, prompts, 40) == answers
        assert manager.stats().preemptions_total > 0


@pytest.mark.usefixtures("depth")
def test_samples_of_one_prompt_share_its_blocks() -> None:
    model = tiny_model()
    answer = greedy(model, PROMPTS[1], NUM_NEW)
    with running(model, tools=FLASH) as manager:
        sampling = SamplingParams(temperature=0.0, num_return_sequences=3, max_new_tokens=NUM_NEW)
        name = manager.add_request(PROMPTS[1], sampling=sampling)
        for request_id in (name, f"{name}__child#0", f"{name}__child#1"):
            assert result_of(manager, request_id).generated_tokens == answer


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_an_earlier_owner_left_in_a_block_is_never_read(family: str) -> None:
    model = tiny_model(family)
    answers = [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]
    with running(model, tools=FLASH) as manager:
        cache = manager._loop._runner._cache
        for store in (*cache._keys_HNCD, *cache._values_HNCD):
            store.fill_(float("nan"))
        assert run_all(manager, PROMPTS, NUM_NEW) == answers


@pytest.mark.parametrize(("max_blocks", "num_decoding"), [(None, {2}), (1, {1}), (0, set())])
def test_max_blocks_per_request_bounds_who_decodes(max_blocks: int | None, num_decoding: set[int]) -> None:
    """Of two requests in decode steps, one has one block and one has four."""
    model, calls = tiny_model(), Calls()
    prompts = [prompt_of(3), prompt_of(50)]
    answers = [greedy(model, prompt, 8) for prompt in prompts]
    with running(model, tools={"flash": counting(calls)}, max_blocks_per_request=max_blocks) as manager:
        with manager.pause(weights_changed=False):  # so that both go into one step
            ids = [manager.add_request(prompt, max_new_tokens=8) for prompt in prompts]
        assert [result_of(manager, request_id).generated_tokens for request_id in ids] == answers
    assert set(calls.decode) == num_decoding
    steps, layers = 8, 2
    assert len(calls.varlen) == layers * (1 if num_decoding == {2} else steps)


def test_the_decode_table_is_as_wide_as_hints_or_the_model_say() -> None:
    def resolved(hints: WorkloadHints | None, **values: Any) -> int:
        manager = ContinuousBatchingManager(tiny_model(), None, small_config(**values), hints, flash=KERNELS)
        return manager.config.max_blocks_per_request

    assert resolved(None) == 512 / 16
    assert resolved(WorkloadHints(max_prompt_length=40, max_generated_length=10)) == 6
    assert resolved(WorkloadHints(max_prompt_length=40), max_blocks_per_request=9) == 9


def test_asking_for_a_decode_way_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match=r"max_blocks_per_request=4 .* the device is cpu; leave it"):
        ContinuousBatchingManager(tiny_model(), None, small_config(max_blocks_per_request=4))


@pytest.mark.parametrize(
    ("family", "kernels", "values", "reason"),
    [
        ("llama", KERNELS, {"auto_switch_to_flash": False}, "auto_switch_to_flash is False"),
        ("gpt_oss", KERNELS, {}, "the model has attention sinks"),
        ("deepseek_v3", KERNELS, {}, "keys and values differ in width"),
        ("llama", replace(KERNELS, max_width=8), {}, "heads are 16 wide"),
        ("llama", replace(KERNELS, width_multiple=32), {}, "heads are 16 wide"),
        ("llama", replace(KERNELS, page_multiple=256), {}, "page_size is 16"),
        ("llama", replace(KERNELS, dtypes=(torch.bfloat16,)), {}, "dtype is torch.float32"),
        ("llama", None, {}, "the device is cpu"),
    ],
)
def test_where_flash_cannot_be_used_torch_computes_and_one_line_says_why(
    family: str, kernels: FlashKernels | None, values: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family)
    answers = [greedy(model, prompt, 4) for prompt in PROMPTS[:2]]
    caplog.set_level(logging.INFO, logger="engine.attention.choice")
    with running(model, tools={"flash": kernels}, **values) as manager:
        assert run_all(manager, PROMPTS[:2], 4) == answers
    (record,) = (record for record in caplog.records if record.name == "engine.attention.choice")
    assert "backend=sdpa" in record.getMessage()
    assert reason in record.getMessage()


def test_the_limits_of_the_real_kernels() -> None:
    real = FlashKernels(varlen=KERNELS.varlen, decode=KERNELS.decode)
    layers = [LayerShape(num_kv_heads=2, key_width=128, value_width=128)]
    assert objection_to_flash(real, layers, dtype=torch.bfloat16, page_size=256) is None
    assert objection_to_flash(real, layers, dtype=torch.float16, page_size=512) is None
    assert "multiple of 256" in str(objection_to_flash(real, layers, dtype=torch.bfloat16, page_size=128))
    assert "float32" in str(objection_to_flash(real, layers, dtype=torch.float32, page_size=256))


def test_a_cpu_has_no_flash_attention() -> None:
    assert find_flash(torch.device("cpu")) == "the device is cpu"
