"""What transformers' `GenerationConfig` says about a request that says nothing itself."""

import copy
import logging
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from engine.errors import InvalidRequest
from engine.request import SamplingParams
from engine.sampling_fields import OURS, PROCESSOR_OFF_VALUES, WARPER_OFF_VALUES

DEFAULT_TOP_K = 50
"""What `generate` uses when sampling is on and top_k is not set."""

REFUSED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "dola_layers": (),
    "token_healing": (False,),
    "low_memory": (False,),
    "prompt_lookup_num_tokens": (),
    "is_assistant": (False,),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "speculation_type": (),
    "use_mtp": (False,),
    "decoder_start_token_id": (),
    "cache_config": ({},),
    "continuous_batching_config": (),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
}
"""Fields that ask for what the engine does not do, with the values that do not, as None does."""
WITHOUT_EFFECT = frozenset(
    {
        "early_stopping",  # beams only, as the next one
        "length_penalty",
        "num_assistant_tokens",  # of assisted generation, as the next five; what asks for that is refused
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "max_matching_ngram_size",
        "assistant_lookbehind",
        "target_lookbehind",
        "use_cache",  # how `generate` computes, as the next six, not what
        "cache_implementation",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "prefill_chunk_size",
        "return_dict_in_generate",
        "bos_token_id",  # a prompt is never empty
        "pad_token_id",  # nothing is padded
        "transformers_version",
    }
)
"""Fields that change no token here, whatever their value."""
_PASSED_ON = (*PROCESSOR_OFF_VALUES.keys() - OURS, *WARPER_OFF_VALUES, "max_time")
"""Fields that `SamplingParams` has under the same name and with the same meaning."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What fills the unset fields of a request.

    max_length: bounds prompt and output of a request without max_new_tokens; None where no config says so.
    model_stop_strings: those of the model's own config; they need a tokenizer, so they apply where one is given.
    """

    sampling: SamplingParams
    max_length: int | None = None
    model_stop_strings: tuple[str, ...] = ()


def generation_defaults(model_config: GenerationConfig, given: GenerationConfig | None) -> GenerationDefaults:
    """Gives the defaults of a config that the caller gave, filled from the model's own as `generate` does.

    A field the engine cannot honour is refused by name where the caller set it. In the model's own config, which nobody
    may have chosen, it is named in a warning.
    """
    if given is not None and (unsupported := _unsupported(given, model_config)):
        raise InvalidRequest(
            f"generation_config sets {', '.join(f'{name}={value!r}' for name, value in unsupported.items())}, which the"
            " engine does not apply; unset it",
            param=next(iter(unsupported)),
        )
    if unsupported := _unsupported(model_config, model_config):
        logger.warning("the model's generation config sets fields that are not applied fields=%s", unsupported)
    config = _merged(model_config, given)
    own_stop_strings = given is None or given.stop_strings is None
    sampling = SamplingParams(
        temperature=float(config.temperature if config.temperature is not None else 1.0) if config.do_sample else 0.0,
        top_k=_top_k(config),
        top_p=float(config.top_p if config.top_p is not None else 1.0),
        max_new_tokens=config.max_new_tokens,
        eos_token_ids=as_token_ids(config.eos_token_id),
        num_return_sequences=config.num_return_sequences or 1,
        stop_strings=None if own_stop_strings else config.stop_strings,
        **{name: getattr(config, name) for name in _PASSED_ON},
    )
    stop_strings = SamplingParams(stop_strings=config.stop_strings).stop_strings if own_stop_strings else None
    return GenerationDefaults(
        sampling=sampling,
        max_length=given.max_length if given is not None else None,
        model_stop_strings=tuple(stop_strings or ()),
    )


def as_token_ids(eos: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """Gives the ids of `eos_token_id` in any form transformers accepts; -1 is its way to say none."""
    if eos is None:
        return ()
    try:
        ids = (eos,) if isinstance(eos, int) else tuple(eos)
    except TypeError:
        raise InvalidRequest(f"eos_token_id is {eos!r}; it must be an id or a list of ids", "eos_token_id") from None
    return tuple(token for token in ids if token != -1)


def _merged(model_config: GenerationConfig, given: GenerationConfig | None) -> GenerationConfig:
    if given is None:
        return model_config
    merged = copy.deepcopy(given)
    for name, value in _set_fields(model_config).items():
        if getattr(merged, name, None) is None:
            setattr(merged, name, value)
    return merged


def _unsupported(config: GenerationConfig, model_config: GenerationConfig) -> dict[str, Any]:
    """Gives what the engine does not do, and names that are not transformers' and not the model's either."""
    known = vars(GenerationConfig()).keys() | _set_fields(model_config).keys()
    return {
        name: value
        for name, value in _set_fields(config).items()
        if name not in known or (name in REFUSED and value not in REFUSED[name])
    }


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}


def _top_k(config: GenerationConfig) -> int:
    if config.top_k is not None:
        return int(config.top_k)
    return DEFAULT_TOP_K if config.do_sample else 0
