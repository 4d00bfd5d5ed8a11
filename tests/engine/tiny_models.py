"""Tiny random decoders of many families: 256 tokens, two layers, four heads, the same weights for the same seed.

Their weights are spread wide, so that greedy outputs vary and the best score is far from the second.
"""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 256
SLIDING_WINDOW = 20

_GROUPED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MULTI_HEAD = {key: value for key, value in _GROUPED.items() if key != "num_key_value_heads"}

SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama_tied": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": SLIDING_WINDOW}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            **_GROUPED,
            **_HYBRID,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**_GROUPED, **_HYBRID, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}),
    "phi3": ("Phi3Config", {**_GROUPED, "original_max_position_embeddings": 512}),
    "cohere2": ("Cohere2Config", {**_GROUPED, "sliding_window": SLIDING_WINDOW, "layer_types": _HYBRID["layer_types"]}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "phimoe": ("PhimoeConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ministral3": (
        "Ministral3Config",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", _MULTI_HEAD),
    "opt": ("OPTConfig", {**_MULTI_HEAD, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_oss": ("GptOssConfig", {**_GROUPED, **_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_GROUPED,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}
"""Families that the engine serves."""
EAGER_ONLY = {"gemma2"}
"""Their scores have a soft cap, which some releases of transformers leave out where torch computes attention."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {**_MULTI_HEAD, "alibi": False}),
    "llama4": ("Llama4TextConfig", {**_GROUPED, "intermediate_size_mlp": 96, "head_dim": 16}),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_GROUPED, **_EXPERTS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "jamba": ("JambaConfig", {**_GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "t5": (
        "T5Config",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    ),
}
"""Families that the engine refuses."""


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Gives a float32 model on the CPU, in eval mode; `overrides` are fields of its config."""
    class_name, fields = (SUPPORTED | REFUSED)[family]
    if family in EAGER_ONLY:
        fields = {"attn_implementation": "eager", **fields}
    config: PreTrainedConfig = getattr(transformers, class_name)(**{**fields, **overrides})
    auto_class: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    _spread_weights(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    torch.nn.Module.eval(model)
    return model


def _spread_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(0.1 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(0.1 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                # Small beside what the layers add, or every token would follow from the one before it alone.
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
