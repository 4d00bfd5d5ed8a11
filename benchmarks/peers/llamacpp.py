"""llama.cpp through xllamacpp's server inside the process. `prepare` and `load` run in its environment.

The GGUF file is written here, in f32. Its vocabulary's words are the ids in decimal, so that the text that comes back
tells them exactly, and it names no end token, so that none ends a request.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TITLE = "llama.cpp"
REQUIREMENTS = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors==0.8.0", "numpy==2.4.6")
REMOVED: tuple[str, ...] = ()
SETTINGS = (
    {"n_batch": 2048, "n_ubatch": 512, "flash_attn": 1},
    {"n_batch": 2048, "n_ubatch": 512, "flash_attn": 0},
    {"n_batch": 2048, "n_ubatch": 2048, "flash_attn": 0},
)
NOTE = "weights in a GGUF of f32, KV cache f32 (its default is f16), as many slots as prompts, the wheel's AVX2 build"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def environment(job: dict[str, Any], folder: Path) -> dict[str, str]:  # noqa: ARG001  # the protocol of peers
    """Gives the variables of the process."""
    return {}


def prepare(model: str, target: str) -> None:
    """Writes the file. Raises ValueError for anything but a Llama without biases."""
    import gguf

    config = json.loads((Path(model) / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"the model is a {config['model_type']}; the GGUF writer of this benchmark knows llama alone")
    writer = gguf.GGUFWriter(target, "llama")
    _write_shape(writer, config)
    _write_vocabulary(writer, config["vocab_size"])
    for name, tensor in _tensors(Path(model), config):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)  # all f32


def _write_vocabulary(writer: Any, size: int) -> None:
    """RWKV's is the one kind of vocabulary for which llama.cpp assumes no end token."""
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f" {number}" for number in range(size)])
    writer.add_token_types([1] * size)


def _tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                target = _gguf_name(name)
                tensor = file.get_tensor(name).astype("float32")
                kind = target.split(".")[-2]
                yield target, _interleave(tensor, heads[kind]) if kind in heads else tensor


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    if part not in NAMES:
        raise ValueError(f"the GGUF writer of this benchmark knows no tensor {name}")
    return f"blk.{layer}.{NAMES[part]}.weight"


def _interleave(weight: Any, num_heads: int) -> Any:
    """llama.cpp rotates neighbouring pairs, transformers the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def load(job: dict[str, Any]) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Gives the function that generates."""
    import xllamacpp

    setting, num_slots = job["setting"], len(job["prompts"])
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel = num_slots
    params.n_ctx = job["num_kv_tokens"]
    params.kv_unified = True
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.n_batch, params.n_ubatch = setting["n_batch"], setting["n_ubatch"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type(setting["flash_attn"])
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["num_threads"]
    params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0
    params.n_threads_http = 1
    params.fit_params = False
    server = xllamacpp.Server(params)

    def complete(prompt: list[int], num_new_tokens: int) -> list[int]:
        request = {"prompt": prompt, "max_tokens": num_new_tokens, "temperature": 0, "top_k": 1, "samplers": ["top_k"]}
        text = server.handle_completions(request)["choices"][0]["text"]
        return [int(word) for word in text.split()]

    def generate(prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        # The server takes one request a call and batches what runs at once.
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(complete, prompts, [num_new_tokens] * len(prompts)))

    return generate
