"""What transformers' `GenerationConfig` says about a request that says nothing itself."""

import logging

from transformers import GenerationConfig

from engine.errors import InvalidRequest
from engine.request import SamplingParams

DEFAULT_TOP_K = 50
"""What `generate` uses when sampling is on and top_k is not set."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ({},),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "guidance_scale": (1,),
    "stop_strings": ([],),
    "max_time": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "dola_layers": (),
    "token_healing": (False,),
}
"""Fields that change the output and that the engine does not apply, with the values that mean "off", as None does."""

logger = logging.getLogger(__name__)


def unsupported_fields(config: GenerationConfig) -> list[str]:
    """Names the fields, with their values, that ask for something the engine does not do."""
    found = []
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            found.append(f"{name}={value!r}")
    return found


def sampling_defaults(
    model_config: GenerationConfig, given: GenerationConfig | None
) -> tuple[SamplingParams, int | None]:
    """Gives what fills a request's unset fields, and the total length that `max_length` allows (None: not said).

    A field the engine does not apply is refused by name in a config that the caller gave. In the model's own config,
    which nobody may have chosen, it is named in a warning.
    """
    config = given if given is not None else model_config
    unsupported = unsupported_fields(config)
    if unsupported and given is not None:
        raise InvalidRequest(
            f"generation_config sets {', '.join(unsupported)}, which the engine does not apply; unset it",
            param=unsupported[0].split("=")[0],
        )
    if unsupported:
        logger.warning(
            "the model's generation config sets fields that are not applied fields=%s",
            ",".join(unsupported),
        )
    eos = config.eos_token_id if config.eos_token_id is not None else model_config.eos_token_id
    defaults = SamplingParams(
        temperature=float(config.temperature if config.temperature is not None else 1.0) if config.do_sample else 0.0,
        top_k=_top_k(config),
        top_p=float(config.top_p if config.top_p is not None else 1.0),
        max_new_tokens=config.max_new_tokens,
        eos_token_ids=as_token_ids(eos),
    )
    return defaults, config.max_length if given is not None else None


def as_token_ids(eos: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """Gives the ids of `eos_token_id` in any form transformers accepts; -1 is its way to say none."""
    if eos is None:
        return ()
    try:
        ids = (eos,) if isinstance(eos, int) else tuple(eos)
    except TypeError:
        raise InvalidRequest(f"eos_token_id is {eos!r}; it must be an id or a list of ids", "eos_token_id") from None
    return tuple(token for token in ids if token != -1)


def _top_k(config: GenerationConfig) -> int:
    if config.top_k is not None:
        return int(config.top_k)
    return DEFAULT_TOP_K if config.do_sample else 0
