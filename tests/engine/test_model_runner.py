from collections.abc import Iterator

import pytest
import torch
from engine_runs import greedy, prompt_of
from tiny_models import SUPPORTED, tiny_model

from engine import ContinuousBatchingConfig, RequestStatus, SamplingParams, UnsupportedModel, generate_batch
from engine.active_request import ActiveRequest
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner, probe_layers
from engine.plan import PlannedRow, StepPlan
from engine.sizing import resolve_config

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_new_tokens=8, eos_token_ids=(), logprobs=False)
CONFIG = ContinuousBatchingConfig(page_size=16, num_blocks=16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_greedy(runner: ModelRunner, prompt: list[int], block_ids: list[int]) -> list[int]:
    request = ActiveRequest("a", prompt, GREEDY, created_time=0.0)
    tables = [block_ids] * len(runner._config.windows)
    start = 0
    while len(request.output_ids) < 8:
        plan = StepPlan([PlannedRow(request, start, request.token_ids[start:], tables, samples=True)])
        start = request.num_tokens
        sampled = runner.launch(plan).wait()["a"]
        assert sampled.error is None
        request.append(sampled.token)
    return request.output_ids


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_what_an_earlier_owner_left_in_a_block_is_never_read(family: str) -> None:
    model = tiny_model(family)
    layers = probe_layers(model)
    clean, dirty = (ModelRunner(model, resolve_config(CONFIG, model, layers), layers) for _ in range(2))
    for store in (*dirty._cache._keys_HNCD, *dirty._cache._values_HNCD):
        store.fill_(float("nan"))
    prompt = list(range(1, 30))
    assert run_greedy(dirty, prompt, [3, 1, 2]) == run_greedy(clean, prompt, [0, 1, 2])


def test_a_request_on_which_the_model_raises_fails_alone() -> None:
    model = tiny_model("llama")
    prompts = [[1, 2, 3], [13, 4, 5], [6, 7, 8]]
    undisturbed = list(generate_batch(model, prompts, continuous_batching_config=CONFIG, sampling=GREEDY).values())

    def refuse_thirteen(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if (inputs[0] == 13).any():
            raise ValueError("thirteen")

    hook = model.get_input_embeddings().register_forward_pre_hook(refuse_thirteen)
    try:
        outputs = list(generate_batch(model, prompts, continuous_batching_config=CONFIG, sampling=GREEDY).values())
    finally:
        hook.remove()
    assert [output.status for output in outputs] == [
        RequestStatus.FINISHED,
        RequestStatus.FAILED,
        RequestStatus.FINISHED,
    ]
    assert "thirteen" in (outputs[1].error or "")
    assert [outputs[i].generated_tokens for i in (0, 2)] == [undisturbed[i].generated_tokens for i in (0, 2)]


def test_the_model_is_its_owners_again_after_a_forward_pass() -> None:
    model = tiny_model("llama")
    implementation = model.config._attn_implementation
    model.train()
    list(generate_batch(model, [[1, 2, 3]], continuous_batching_config=CONFIG, sampling=GREEDY))
    assert model.training
    assert model.config._attn_implementation == implementation


def test_a_model_whose_layers_bypass_the_attention_interface_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn = _NoAttention()
    with pytest.raises(UnsupportedModel, match="1 of its 2 layers"):
        probe_layers(model)


HIDING = {
    "phimoe": {"sliding_window": 20, "use_sliding_window": False},
    "llama": {"sliding_window": 20},
    "gpt_neox": {"sliding_window": 20},
    "olmo2": {"attention_chunk_size": 20},
}
"""Families that tell attention nothing of such a field of their config, which transformers' cache follows."""


@pytest.mark.parametrize("family", HIDING)
def test_a_window_that_layers_do_not_tell_of_is_refused(family: str) -> None:
    model = tiny_model(family, **HIDING[family])
    with pytest.raises(UnsupportedModel, match=r"hides \w+=20 of its config"):
        probe_layers(model)


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_window_in_the_config_is_told_of_or_refused(family: str) -> None:
    model = tiny_model(family, sliding_window=20)
    try:
        probe_layers(model)
    except UnsupportedModel:
        return
    prompt = prompt_of(50)
    expected = greedy(model, prompt, 8)
    (found,) = generate_batch(model, [prompt], continuous_batching_config=CONFIG, sampling=GREEDY).values()
    assert found.generated_tokens == expected


def test_a_window_as_long_as_the_model_is_none() -> None:
    assert [layer.window for layer in probe_layers(tiny_model("phimoe", sliding_window=512))] == [None, None]


def test_a_model_that_keeps_keywords_from_its_attention_is_refused_by_a_sentence() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn

    def forward(hidden_states: torch.Tensor, **keywords: object) -> object:
        known = {name: keywords[name] for name in ("position_embeddings", "attention_mask")}
        return type(attention).forward(attention, hidden_states, **known)

    attention.forward = forward
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM does not pass keywords on to its attention"):
        probe_layers(model)


def test_layers_whose_indices_leave_one_out_are_refused_by_them() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    model.config.num_hidden_layers = 2
    with pytest.raises(UnsupportedModel, match="indices 0, 2, and they have to be 0 to 1"):
        probe_layers(model)


class _NoAttention(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_read_takes_whole_chunks_in_the_order_named() -> None:
    model = tiny_model("llama")
    layers = probe_layers(model)
    config = resolve_config(ContinuousBatchingConfig(page_size=64, num_blocks=2), model, layers)
    cache = KVCache(layers, config, dtype=torch.float32, device=torch.device("cpu"))
    assert (cache.chunk_tokens, cache.chunks_per_block) == (32, 2)
    keys_HTD = torch.randn(2, 40, 16)
    cache.write(0, keys_HTD, keys_HTD * 2, torch.arange(64, 104))
    read_keys, read_values = cache.read(0, torch.tensor([3, 2]))
    assert torch.equal(read_keys[:, 32:], keys_HTD[:, :32])
    assert torch.equal(read_values[:, :8], keys_HTD[:, 32:] * 2)
