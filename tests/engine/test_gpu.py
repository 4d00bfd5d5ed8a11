"""What only a GPU can show: `make test-gpu` on a machine with one, an Ampere or later, and flash-attn installed.

Nothing here needs a download. In bfloat16 two ways to the same number differ in the last bits, so what the engine drew
is put through a plain forward pass of the same model and the log-probabilities are compared.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import greedy, prompt_of, result_of, run_all, running
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine import (
    ContinuousBatchingConfig,
    GenerationOutput,
    RequestStatus,
    SamplingParams,
    init_continuous_batching,
    stage_weights,
)
from engine.attention.flash import FlashKernels, find_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_NEW = 40
VOCAB_SIZE = 32_000
PROMPTS = [prompt_of(length, seed=6, vocab_size=VOCAB_SIZE) for length in (1, 5, 200, 300, 700, 1500)]
MEAN_DIFFERENCE = 0.02
"""Of log-probabilities: two or three units in the last place of a bfloat16 score of about 4."""
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_new_tokens=NUM_NEW, logprobs=True)
PAGES: dict[str, Any] = {"page_size": 256, "num_blocks": 128, "max_batch_tokens": 1024}
"""flash-attn reads pages of 256 tokens, or multiples."""


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def kernels() -> FlashKernels:
    found = find_flash(torch.device("cuda", 0))
    assert isinstance(found, FlashKernels), f"this test is of flash attention, and {found}"
    return found


def llama(*, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Gives eight layers with grouped heads of width 64, as small as flash-attn and a GPU's memory rules make sense."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to("cuda", dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def mean_difference(model: PreTrainedModel, output: GenerationOutput) -> float:
    """Gives how far the log-probabilities of an output are from those of a plain forward pass over all of it."""
    ids = [*output.prompt_ids, *output.generated_tokens]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([ids], device="cuda")).logits[0].float()
    first = len(output.prompt_ids) - 1
    plain_TV = torch.log_softmax(logits_TV[first:-1], dim=-1)
    drawn = torch.tensor(output.generated_tokens, device="cuda")
    plain_T = plain_TV.gather(-1, drawn[:, None])[:, 0]
    return float((plain_T - torch.tensor(output.logprobs, device="cuda")).abs().mean())


def outputs_of(model: PreTrainedModel, **values: Any) -> list[GenerationOutput]:
    with running(model, **{**PAGES, **values}) as manager:
        ids = [manager.add_request(prompt, sampling=SAMPLED) for prompt in PROMPTS]
        return [result_of(manager, request_id) for request_id in ids]


def assert_parity(model: PreTrainedModel, outputs: list[GenerationOutput]) -> None:
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert all(len(output.generated_tokens) == NUM_NEW for output in outputs)
    differences = [mean_difference(model, output) for output in outputs]
    assert max(differences) < MEAN_DIFFERENCE, differences


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_float32_greedy_tokens_equal_plain_generate(family: str, overlap: bool) -> None:
    model = tiny_model(family).to("cuda")
    prompts = [prompt_of(length, seed=4) for length in (1, 30, 50, 55)]
    answers = [greedy(model, prompt, 12) for prompt in prompts]
    with running(model, max_batch_tokens=48, use_async_batching=overlap) as manager:
        assert [run_all(manager, prompts, 12) for _ in range(2)] == [answers] * 2


@pytest.mark.parametrize(
    "values",
    [
        {"use_cuda_graph": False},
        {"use_cuda_graph": False, "max_blocks_per_request": 0},
        {"use_cuda_graph": True},
        {"use_cuda_graph": True, "use_async_batching": True},
        {"use_cuda_graph": False, "use_async_batching": True},
        {"use_cuda_graph": True, "use_async_batching": False, "default_compile_level": 1},
    ],
    ids=str,
)
def test_flash_attention_agrees_with_a_plain_pass(kernels: FlashKernels, values: dict[str, Any]) -> None:
    model = llama()
    assert_parity(model, outputs_of(model, **values))


@pytest.mark.parametrize("overlap", [False, True])
def test_torchs_attention_agrees_with_a_plain_pass(overlap: bool) -> None:
    model = llama()
    assert_parity(model, outputs_of(model, auto_switch_to_flash=False, use_async_batching=overlap))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "cohere2"])
def test_flash_attention_knows_windows_and_soft_caps(kernels: FlashKernels, family: str) -> None:
    """A plain pass in float32 is the judge of both backends: flash must not be much farther from it than torch is."""
    fields = {"max_position_embeddings": 2048, "head_dim": 64} if family.startswith("gemma") else {}
    model = tiny_model(family, **{"max_position_embeddings": 2048, **fields}).to("cuda", torch.bfloat16)
    judge = tiny_model(family, **{"max_position_embeddings": 2048, **fields}).to("cuda")
    means = []
    for switch in (True, False):
        with running(model, **PAGES, auto_switch_to_flash=switch, use_cuda_graph=switch) as manager:
            ids = [manager.add_request(prompt_of(n, seed=3), sampling=SAMPLED) for n in (3, 300, 600)]
            outputs = [result_of(manager, request_id) for request_id in ids]
        means.append(sum(mean_difference(judge, output) for output in outputs) / len(outputs))
    assert means[0] < 1.5 * means[1] + 0.01, means


def test_steps_are_captured_and_replayed(kernels: FlashKernels, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = llama()
    with running(model, **PAGES, max_requests_per_batch=16) as manager:
        manager.warmup()
        graphs = manager._runner._graphs
        assert len(graphs._graphs) == 2, "the largest mixed step and 16 rows that decode"
        run_all(manager, PROMPTS, NUM_NEW)
        assert {shape.num_decoding > 0 for shape in graphs._graphs} == {True, False}
    assert "cannot be captured" not in caplog.text


def test_weights_change_in_place_under_graphs(kernels: FlashKernels, tmp_path: Path) -> None:
    model, other = llama(), llama(seed=1)
    other.save_pretrained(tmp_path)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with running(model, **PAGES) as manager:
        manager.warmup()
        before = [result_of(manager, manager.add_request(prompt, sampling=SAMPLED)) for prompt in PROMPTS]
        staged = stage_weights(model, str(tmp_path))
        pause_s = manager.commit_weights(staged)
        after = [result_of(manager, manager.add_request(prompt, sampling=SAMPLED)) for prompt in PROMPTS]
        with manager.pause():
            staged.rollback()
        back = [result_of(manager, manager.add_request(prompt, sampling=SAMPLED)) for prompt in PROMPTS]
        num_graphs = len(manager._runner._graphs._graphs)
    assert num_graphs > 0
    assert pause_s < 5
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert_parity(model, before)
    assert_parity(other, after)
    assert_parity(model, back)


def test_evicted_blocks_come_back_from_pinned_memory() -> None:
    model = llama()
    with running(model, **{**PAGES, "num_blocks": 12}, cpu_offload_space=0.25) as manager:
        assert all(store.is_pinned() for store in manager._runner._cache._host_HNCD)
        for _ in range(3):
            outputs = [result_of(manager, manager.add_request(prompt, sampling=SAMPLED)) for prompt in PROMPTS]
            for output in outputs:
                assert mean_difference_after(manager, model, output) < MEAN_DIFFERENCE
        assert manager.stats().num_host_blocks > 0
        assert max(output.num_cached_tokens for output in outputs) >= 1280


def mean_difference_after(manager: Any, model: PreTrainedModel, output: GenerationOutput) -> float:
    """The model belongs to the manager while that runs, but for a pause."""
    with manager.pause(weights_changed=False):
        return mean_difference(model, output)


@pytest.mark.parametrize("values", [{}, {"auto_switch_to_flash": False}], ids=str)
def test_no_more_memory_is_taken_than_allowed(values: dict[str, Any]) -> None:
    model = llama()
    torch.cuda.empty_cache()
    free_bytes, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    share = 6 * 2**30 / free_bytes
    config = ContinuousBatchingConfig(max_memory_percent=share, max_batch_tokens=2048, **values)
    torch.cuda.reset_peak_memory_stats()
    manager = init_continuous_batching(model, None, config)
    manager.warmup()
    manager.start()
    prompts = [prompt_of(1200, seed=seed, vocab_size=VOCAB_SIZE) for seed in range(200)]
    ids = manager.add_requests(prompts, max_new_tokens=64)
    assert all(result_of(manager, request_id).error is None for request_id in ids)
    taken = (torch.cuda.max_memory_reserved() - before) / (share * free_bytes)
    manager.destroy()
    assert 0.7 < taken < 1.05


def test_a_burst_of_requests_leaves_nothing_behind(kernels: FlashKernels) -> None:
    """`running` proves it on leaving."""
    model = llama()
    with running(model, **{**PAGES, "num_blocks": 40}, safety_margin=0.0) as manager:
        prompts = [prompt_of(10 + 37 * seed % 900, seed=seed, vocab_size=VOCAB_SIZE) for seed in range(60)]
        ids = [manager.add_request(prompt, sampling=SAMPLED) for prompt in prompts]
        for request_id in ids[::3]:
            manager.cancel_request(request_id)
        outputs = [result_of(manager, request_id) for request_id in ids]
    assert RequestStatus.FAILED not in {output.status for output in outputs}
