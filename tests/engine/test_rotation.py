"""Requests that share steps never change each other's rotary embeddings, whatever kind a model has."""

from typing import Any

import pytest
from engine_runs import greedy, prompt_of, run_all, running, small_config
from tiny_models import tiny_model
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine import ContextLengthExceeded, destroy_cached_continuous_batching_manager, generate_batch
from engine.model import describe

ORIGINAL, LONGEST, NUM_NEW = 64, 160, 8
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [5.0] * 8}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {**_FACTORS, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"factor": 4.0},
}
SWITCHING = {"llama": {}, "phi3": {"original_max_position_embeddings": ORIGINAL}, "gemma3": {}, "phimoe": {}}
"""Families whose embeddings switch at the original length; of PhiMoE also the scale."""


def rotated(kind: str) -> PreTrainedModel:
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]}
    return tiny_model("llama", max_position_embeddings=LONGEST, rope_parameters=parameters)


def switching(family: str) -> PreTrainedModel:
    kind = {"rope_type": "longrope", "rope_theta": 10_000.0, **KINDS["longrope"]}
    if family == "gemma3":  # one kind for each type of layer
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        parameters: dict[str, Any] = {"sliding_attention": plain, "full_attention": kind}
    else:
        parameters = kind | ({"short_mscale": 1.0, "long_mscale": 3.0} if family == "phimoe" else {})
    overrides = {"max_position_embeddings": LONGEST, "rope_parameters": parameters, **SWITCHING[family]}
    return tiny_model(family, **overrides)


def assert_equal_up_to(model: PreTrainedModel, limit: int) -> None:
    """Beside the longest request, in prompts that are cut to pieces, and with a shared prefix."""
    prefix = prompt_of(20, seed=3)
    prompts = [prompt_of(1), prompt_of(30), prompt_of(limit - NUM_NEW), prefix + prompt_of(5), prefix + prompt_of(9)]
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    with running(model, max_batch_tokens=32) as manager:
        assert manager.config.max_model_len == limit
        assert [run_all(manager, prompts, NUM_NEW) for _ in range(2)] == [expected] * 2


def test_every_kind_that_transformers_knows_is_tried() -> None:
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_exact_up_to_the_length_that_is_served(kind: str) -> None:
    model = rotated(kind)
    shape = describe(model)
    assert (shape.max_model_len, shape.is_cut_short) == ((ORIGINAL, True) if kind == "longrope" else (LONGEST, False))
    assert_equal_up_to(model, shape.max_model_len or 0)


@pytest.mark.parametrize("family", SWITCHING)
def test_an_embedding_that_switches_is_served_up_to_its_original_length(family: str) -> None:
    assert_equal_up_to(switching(family), ORIGINAL)


def test_a_longer_request_is_refused_with_the_reason() -> None:
    with running(switching("llama")) as manager:
        with pytest.raises(ContextLengthExceeded, match=f"{ORIGINAL} that fit .*rotary embedding"):
            manager.add_request(prompt_of(ORIGINAL - 4), max_new_tokens=5)
        with pytest.raises(ContextLengthExceeded, match="rotary embedding"):
            manager.add_request(prompt_of(ORIGINAL + 1))
        request_id = manager.add_request(prompt_of(ORIGINAL - 4))
        output = manager.get_result(request_id, timeout=30)
        assert output is not None
        assert len(output.generated_tokens) == 4


def test_a_smaller_cache_is_not_blamed_on_the_embedding() -> None:
    with running(switching("llama"), num_blocks=2) as manager, pytest.raises(ContextLengthExceeded) as caught:
        manager.add_request(prompt_of(40), max_new_tokens=5)
    assert "rotary" not in str(caught.value)


def test_an_original_length_beyond_the_models_changes_nothing() -> None:
    parameters = {"rope_type": "longrope", "rope_theta": 10_000.0, **_FACTORS, "original_max_position_embeddings": 512}
    shape = describe(tiny_model("llama", max_position_embeddings=LONGEST, rope_parameters=parameters))
    assert (shape.max_model_len, shape.is_cut_short) == (LONGEST, False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_embedding_writes_to_its_own_buffers_is_no_change_of_weights(kind: str) -> None:
    model, prompt = rotated(kind), prompt_of(40)
    try:
        for num_cached in (0, 32):
            (output,) = generate_batch(
                model,
                [prompt],
                continuous_batching_config=small_config(),
                max_new_tokens=NUM_NEW,
                persistent_manager=True,
            ).values()
            assert [span.version for span in output.weight_versions] == [1]
            assert output.num_cached_tokens == num_cached
            greedy(model, prompt_of(20), NUM_NEW)
    finally:
        destroy_cached_continuous_batching_manager(model)
