"""A wheel like the one the default model comes in, holding a random model of a few kilobytes."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from serve_app.model_store import PackagedModel

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS, CONTEXT = 32, 4, 2, 64, 2, 128
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_packaged_model(folder: Path, *, sha256: str | None = None) -> PackagedModel:
    """Write the wheel into folder; sha256 stands for the true digest unless given."""
    file_name = "tiny.Q4_1.gguf"
    model_file = folder / file_name
    _write_gguf(model_file)
    wheel = folder / "tiny_model-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model_file, f"tiny_model/{file_name}")
        archive.writestr("tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr("tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    digest = sha256 or hashlib.sha256(model_file.read_bytes()).hexdigest()
    return PackagedModel(name="tiny", requirement=str(wheel), file_name=file_name, sha256=digest, download_mb=1)


def _write_gguf(path: Path) -> None:
    tokens = [*SPECIAL_TOKENS, *(chr(code) for code in range(ord("!"), ord("~") + 1)), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))  # control, normal
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_tensors(writer, num_tokens=len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, *, num_tokens: int) -> None:
    random = np.random.default_rng(0)
    head_size = HIDDEN // HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * head_size, HIDDEN),
        "attn_v": (KV_HEADS * head_size, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    writer.add_tensor("token_embd.weight", random.normal(size=(num_tokens, HIDDEN)).astype(np.float32))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
