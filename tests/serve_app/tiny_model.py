"""A tiny random Llama with a byte-level tokenizer and a chat template, as a Hugging Face folder."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEIGHTS_FILE = "model.safetensors"


def make_model_folder(path: Path, *, seed: int = 0, hidden_size: int = 64, max_position_embeddings: int = 2048) -> str:
    """Writes the folder and gives its path. Equal seeds give equal weights; the shapes do not depend on the seed.

    Greedy output never ends by itself: the score of the end token is always 0, and of 256 random others one is higher.
    """
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    torch.nn.init.zeros_(model.lm_head.weight[config.eos_token_id])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def make_folder_that_draws(token: int, path: Path) -> str:
    """Writes a model that always draws this token: its scores come from one constant vector, so no cache matters."""
    folder = make_model_folder(path)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[token] = 1.0
    model.save_pretrained(folder)
    return folder


def changed_weights(source: str, path: Path, *, change: str) -> str:
    """Writes a copy of the weights of `source` with one fault in a tensor: missing, extra, misshapen or non-finite."""
    tensors = load_file(Path(source) / WEIGHTS_FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["model.layers.7.mlp.down_proj.weight"] = tensors[name].clone()
    elif change == "misshapen":
        tensors[name] = tensors[name][:, :-1].contiguous()
    else:
        tensors[name][0, 0] = float("nan")
    path.mkdir()
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})
    return str(path)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast
