"""Which models load, what the engine reads from them, and in which words the others are refused."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import REFUSED, SUPPORTED, VOCAB_SIZE, tiny_model
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from engine.errors import UnsupportedModel, WeightsInvalid, WeightsSourceError
from engine.model import check_model, check_supported, describe, load_model

OBJECTIONS = {
    "bloom": "attention interface",
    "falcon": "attention interface",
    "llama4": "chunked_attention",
    "mamba": "linear_attention",
    "qwen3_next": "linear_attention",
    "jamba": "linear_attention",
    "t5": "encoder-decoder",
}


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_decoder_with_attention_is_supported(family: str) -> None:
    model = tiny_model(family)
    check_supported(model)
    shape = describe(model)
    assert (shape.vocab_size, shape.num_layers) == (VOCAB_SIZE, 2)
    assert shape.has_learned_positions is (family in {"gpt2", "opt"})
    assert (shape.dtype, shape.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "gemma3"])
def test_the_length_limit_is_that_of_the_config(family: str) -> None:
    assert describe(tiny_model(family)).max_model_len == 512


@pytest.mark.parametrize("family", REFUSED)
def test_other_architectures_are_refused_in_one_sentence(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(UnsupportedModel, match=OBJECTIONS[family]) as caught:
        check_supported(model)
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["t5", "mamba", "llama4"])
def test_a_folder_is_refused_from_its_config_before_any_weight_is_read(family: str, tmp_path: Path) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=OBJECTIONS[family]):
        load_model(str(tmp_path))


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_config_alone_tells_that_a_model_is_supported(family: str, tmp_path: Path) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    check_model(str(tmp_path))


@pytest.mark.parametrize("family", REFUSED)
def test_a_config_alone_tells_that_a_model_is_not(family: str, tmp_path: Path) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=OBJECTIONS[family]):
        check_model(str(tmp_path))


def test_a_config_alone_tells_that_a_model_cannot_be_cut(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="divides"):
        check_model(str(tmp_path), tensor_parallel_size=3)


def test_layers_that_share_keys_and_values_are_refused() -> None:
    model = tiny_model("gemma3")
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModel, match="from other layers"):
        check_supported(model)


def test_attention_that_looks_ahead_is_refused() -> None:
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UnsupportedModel, match="looks ahead"):
        check_supported(BertLMHeadModel(config))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        check_supported(tiny_model("llama").model)


def test_a_model_without_storage_is_refused() -> None:
    meta = tiny_model("llama")
    torch.nn.Module.to(meta, torch.device("meta"))
    with pytest.raises(UnsupportedModel, match="meta"):
        check_supported(meta)


def test_the_text_part_of_a_multimodal_model_is_described() -> None:
    text = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=99,
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "model_type": "clip_vision_model",
    }
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=199)
    model = LlavaForConditionalGeneration(config)
    check_supported(model)
    shape = describe(model)
    assert (shape.vocab_size, shape.num_layers, shape.max_model_len) == (200, 3, 99)


def test_load_model_gives_the_saved_model_ready_to_serve(tmp_path: Path) -> None:
    saved = tiny_model("llama", seed=3)
    saved.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert describe(model).device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "gpt2", "opt", "gemma3"])
def test_load_model_reads_every_kind_of_checkpoint(family: str, tmp_path: Path) -> None:
    saved = tiny_model(family)
    saved.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    ids = torch.tensor([[3, 141, 59]])
    torch.testing.assert_close(model(ids).logits, saved(ids).logits)


def test_dtype_is_float32_on_a_cpu_unless_named(tmp_path: Path) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.float32
    assert load_model(str(tmp_path), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "double32", "nn", ""])
def test_a_dtype_that_is_none_is_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype is"):
        load_model(str(tmp_path), dtype=dtype)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(WeightsSourceError, match="there is no folder /nowhere/at/all"):
        load_model("/nowhere/at/all")


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsSourceError, match=str(tmp_path)):
        load_model(str(tmp_path))


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(WeightsSourceError, match=str(tmp_path)):
        load_model(str(tmp_path))


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsSourceError, match=str(tmp_path)):
        load_model(str(tmp_path))


def test_a_checkpoint_that_lacks_a_parameter_is_not_filled_at_random(tmp_path: Path) -> None:
    model = tiny_model("llama")
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(WeightsInvalid, match=r"layers\.1\.mlp\.up_proj") as caught:
        load_model(str(tmp_path))
    assert caught.value.tensor == "model.layers.1.mlp.up_proj.weight"


def test_a_type_unknown_to_transformers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    with pytest.raises(UnsupportedModel, match="ViTModel cannot be served: transformers has no causal language model"):
        load_model(str(tmp_path))
