"""The fields of `SamplingParams`: what values each takes, and which value does nothing.

Standard library only.
"""

from math import inf

from engine import ranges

MAX_SEED = 2**63
MAX_SEQUENCES = 1024
"""Of one request; more is a typing error or an attack."""
MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""

PROCESSOR_OFF_VALUES: dict[str, object] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": (0, 1.0),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": -1,
    "forced_eos_token_id": (),
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "watermarking_config": (),
    "allowed_token_ids": (),
}
"""Fields of `SamplingParams` that act on the scores, with the value that does nothing, as None does."""
OURS = frozenset({"presence_penalty", "frequency_penalty", "allowed_token_ids"})
"""Those of them that transformers does not have."""
WARPER_OFF_VALUES: dict[str, object] = {"min_p": 0, "top_h": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
"""The same for those that act only where the temperature is above 0."""

_MAX_INT64 = 2**63 - 1
_WATERMARKS: tuple[dict[str, ranges.Check], ...] = (
    {
        "greenlist_ratio": ranges.number(minimum=0, maximum=1, excluding=(0, 1)),
        "bias": ranges.number(minimum=-inf),
        "hashing_key": ranges.integer(minimum=1, maximum=_MAX_INT64),
        "seeding_scheme": ranges.choice("lefthash", "selfhash"),
        "context_width": ranges.integer(minimum=1),
    },
    {
        "ngram_len": ranges.integer(minimum=2),
        "keys": ranges.watermark_keys(maximum=_MAX_INT64),
        "context_history_size": ranges.integer(minimum=1),
        "sampling_table_seed": ranges.integer(minimum=0, maximum=_MAX_INT64),
        "sampling_table_size": ranges.integer(minimum=1, maximum=2**24),
        "skip_first_ngram_calls": ranges.flag,
        "debug_mode": ranges.flag,
    },
)
_SHARE = ranges.number(minimum=0, maximum=1)
_SHARE_ABOVE_0 = ranges.number(minimum=0, maximum=1, excluding=(0,))
_SHARE_BELOW_1 = ranges.number(minimum=0, maximum=1, excluding=(1,))
_FACTOR = ranges.number(minimum=0, excluding=(0,))
_OPENAI_PENALTY = ranges.number(minimum=-2, maximum=2)
_COUNT = ranges.integer(minimum=0)
CHECKS: dict[str, ranges.Check] = {
    "temperature": ranges.number(minimum=0, maximum=100),
    "top_k": _COUNT,
    "top_p": _SHARE_ABOVE_0,
    "seed": ranges.integer(minimum=-MAX_SEED, maximum=MAX_SEED - 1),
    "max_new_tokens": ranges.integer(minimum=0),
    "eos_token_ids": ranges.token_ids(minimum=-1),
    "stop_token_ids": ranges.token_ids(),
    "logprobs": ranges.flag,
    "top_logprobs": ranges.integer(minimum=0, maximum=MAX_TOP_LOGPROBS),
    "prompt_logprobs": ranges.integer(minimum=0, maximum=MAX_TOP_LOGPROBS),
    "num_return_sequences": ranges.integer(minimum=1, maximum=MAX_SEQUENCES),
    "min_p": _SHARE,
    "top_h": _SHARE,
    "typical_p": _SHARE_ABOVE_0,
    "epsilon_cutoff": _SHARE_BELOW_1,
    "eta_cutoff": _SHARE_BELOW_1,
    "repetition_penalty": _FACTOR,
    "presence_penalty": _OPENAI_PENALTY,
    "frequency_penalty": _OPENAI_PENALTY,
    "encoder_repetition_penalty": _FACTOR,
    "no_repeat_ngram_size": _COUNT,
    "encoder_no_repeat_ngram_size": _COUNT,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "exponential_decay_length_penalty": ranges.decay,
    "max_time": _FACTOR,
    "bad_words_ids": ranges.token_sequences,
    "sequence_bias": ranges.biased_sequences,
    "suppress_tokens": ranges.token_ids(),
    "begin_suppress_tokens": ranges.token_ids(),
    "forced_bos_token_id": ranges.integer(minimum=-1),
    "forced_eos_token_id": ranges.one_or_more_token_ids,
    "stop_strings": ranges.strings,
    "renormalize_logits": ranges.flag,
    "remove_invalid_values": ranges.flag,
    "watermarking_config": ranges.settings(_WATERMARKS),
    "allowed_token_ids": ranges.token_ids(),
}
"""By field, how a value that is set is checked and brought into its one form."""
