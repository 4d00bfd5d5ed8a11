"""Tokenizers small enough to build in a test: every byte is a token, and a few merges are learned."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the stop string ends here, the end",
    "größe naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 🇩🇪 emoji",
    "e\u0301 a\u0308 combining",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'forbidden' %}{{ raise_exception('not this word') }}"
    "{% endif %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Gives a tokenizer of GPT-2's kind with merges that cut through characters, and `<|end|>` to end with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Gives a tokenizer of Llama 2's kind: pieces with U+2581 for a space, and byte tokens for the rest."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thesopringd", "▁the", "▁st"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
