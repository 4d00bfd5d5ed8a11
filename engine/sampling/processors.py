"""transformers' logits processors for one request, in the order and with the meaning that `generate` gives them.

Shapes: V vocabulary, T tokens of the request.
"""

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, WatermarkLogitsProcessor

from engine.active_request import ActiveRequest
from engine.errors import InvalidRequest
from engine.request import SamplingParams
from engine.sampling.history import TokenHistory
from engine.sampling.own_processors import AllowedTokens, OutputPenalty
from engine.sampling.sampler import SamplingRow
from engine.sampling_fields import OURS, PROCESSOR_OFF_VALUES, WARPER_OFF_VALUES

_SAMPLERS_OWN = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
"""What `sample` does itself, over many rows at once and faster."""
_MAX_SCORE = torch.finfo(torch.float32).max
_OFF_VALUES = PROCESSOR_OFF_VALUES | WARPER_OFF_VALUES
_GENERATE_FIELDS = (*PROCESSOR_OFF_VALUES.keys() - OURS - {"watermarking_config"},)

logger = logging.getLogger(__name__)


class RowProcessors:
    """The processors of one request and the tokens they look at. They may have state: one call a token, in order."""

    def __init__(self, processors: list[LogitsProcessor], sampling_row: SamplingRow, history: TokenHistory) -> None:
        self._processors = processors
        self._sampling_row = sampling_row
        self._history = history

    def process(self, token_ids: list[int], position: int, logits_V: Tensor) -> Tensor:
        """Gives the scores of the token at `position` as float32, 1 x V; `logits_V` stays as it is."""
        ids_1T = self._history.extended_to(token_ids, position)
        scores_1V = logits_V[None].to(torch.float32, copy=True)
        for processor in self._processors:
            scores_1V = processor(ids_1T, scores_1V)
        # A penalty may overflow to +inf, which is the best score to `generate` and no number to the sampler.
        return scores_1V.clamp(max=_MAX_SCORE)

    def catch_up(self, token_ids: list[int], positions: range) -> None:
        """Tells those that remember what they saw of tokens that were drawn elsewhere, one call a token."""
        remembering = [item for item in self._processors if isinstance(item, SynthIDTextWatermarkLogitsProcessor)]
        for position in positions:
            ids_1T = self._history.extended_to(token_ids, position)
            for processor in remembering:
                # What it remembers are hashes of the tokens alone, so that one score stands for all.
                processor(ids_1T, torch.zeros(1, 1, device=ids_1T.device))

    def sampling_row(self, position: int) -> SamplingRow:
        """Gives what is left to do to the scores."""
        row = self._sampling_row
        return SamplingRow(row.temperature, row.top_k, row.top_p, row.seed, position)


class ProcessorBuilder:
    """Builds the processors of a model's requests. What the model's class adds that is not of transformers is dropped
    with a warning that names it, or refused.
    """

    def __init__(self, model: PreTrainedModel, *, drop_foreign: bool = True) -> None:
        self._model: Any = model  # its class may have any `_get_logits_processor`, which transformers does not type
        method: Any = getattr(model, "_get_logits_processor", None)
        self.is_custom = getattr(method, "__func__", None) is not GenerationMixin._get_logits_processor
        """The model's class has processors of its own, whatever a request asks for."""
        self._drop_foreign = drop_foreign
        self._dropped: set[str] = set()
        self._watermarks: WeakValueDictionary[tuple[Any, ...], WatermarkLogitsProcessor] = WeakValueDictionary()
        if self.is_custom:
            self._without_foreign(self._build([0], SamplingParams(temperature=1.0, top_k=0, top_p=1.0)))

    def build(self, request: ActiveRequest) -> RowProcessors:
        """Gives the processors of one request; it may raise whatever the model's class raises."""
        sampling, device = request.sampling, self._model.device
        kept = self._without_foreign(self._build(request.prompt_ids, sampling))
        own = {}
        while kept and isinstance(kept[-1], _SAMPLERS_OWN):
            own[type(kept.pop())] = True
        assert sampling.seed is not None
        row = SamplingRow(
            temperature=_left(own, TemperatureLogitsWarper, sampling.temperature, 1.0) if sampling.temperature else 0.0,
            top_k=int(_left(own, TopKLogitsWarper, sampling.top_k, 0)),
            top_p=_left(own, TopPLogitsWarper, sampling.top_p, 1.0),
            seed=sampling.seed,
            position=0,
        )
        return RowProcessors(kept, row, TokenHistory(device))

    def _without_foreign(self, processors: list[LogitsProcessor]) -> list[LogitsProcessor]:
        names = {type(item).__name__ for item in processors if _is_foreign(item)}
        if names and not self._drop_foreign:
            raise InvalidRequest(
                f"{type(self._model).__name__} adds {', '.join(sorted(names))}, which is not of transformers; set"
                " drop_unsupported_processors=True to generate without it",
                param="drop_unsupported_processors",
            )
        for name in sorted(names - self._dropped):
            logger.warning("a processor that is not of transformers is dropped processor=%s", name)
        self._dropped |= names
        return [item for item in processors if not _is_foreign(item)]

    def _build(self, prompt_ids: list[int], sampling: SamplingParams) -> list[LogitsProcessor]:
        config = _generation_config(prompt_ids, sampling)
        eos = sampling.eos_token_ids
        device = self._model.device
        config._eos_token_tensor = torch.tensor(eos, device=device) if eos else None
        if sampling.watermarking_config:
            config.watermarking_config = _Watermark(dict(sampling.watermarking_config), self._watermarks)
        needs_prompt = config.encoder_repetition_penalty or config.encoder_no_repeat_ngram_size
        built: list[LogitsProcessor] = self._model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt_ids),
            encoder_input_ids=torch.tensor([prompt_ids], device=device) if needs_prompt else None,
            logits_processor=LogitsProcessorList(_own_processors(prompt_ids, sampling)),
            device=device,
        )
        return list(built)


class _Watermark:
    """Stands in for transformers' watermarking config: requests of one watermark share its table of 8 MB."""

    def __init__(self, fields: Mapping[str, Any], shared: WeakValueDictionary[tuple[Any, ...], Any]) -> None:
        self._fields = fields
        self._shared = shared

    def construct_processor(self, vocab_size: int, device: torch.device) -> LogitsProcessor:
        if "ngram_len" in self._fields:
            # This one remembers what it has seen, so that it is the request's own.
            return SynthIDTextWatermarkingConfig(**self._fields).construct_processor(vocab_size, device)
        key = (*sorted(self._fields.items()), vocab_size)
        processor = self._shared.get(key)
        if processor is None:
            processor = WatermarkingConfig(**self._fields).construct_processor(vocab_size, device)
            self._shared[key] = processor
        return processor


def _generation_config(prompt_ids: list[int], sampling: SamplingParams) -> GenerationConfig:
    """Says what the request asks for in the words of transformers."""
    values = {name: getattr(sampling, name) for name in _GENERATE_FIELDS if _is_on(sampling, name)}
    if "bad_words_ids" in values:
        values["bad_words_ids"] = [list(ids) for ids in values["bad_words_ids"]]
    if "sequence_bias" in values:
        values["sequence_bias"] = dict(values["sequence_bias"])
    if "forced_eos_token_id" in values:
        values["forced_eos_token_id"] = list(values["forced_eos_token_id"])
    if sampling.min_new_tokens is not None:
        # As `generate` does; it overrides a min_length.
        values["min_length"] = len(prompt_ids) + sampling.min_new_tokens
    if sampling.temperature:
        values |= {name: getattr(sampling, name) for name in WARPER_OFF_VALUES if _is_on(sampling, name)}
        values |= {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
        values["top_p"] = sampling.top_p
    return GenerationConfig(max_length=len(prompt_ids) + (sampling.max_new_tokens or 0), **values)


def _own_processors(prompt_ids: list[int], sampling: SamplingParams) -> list[LogitsProcessor]:
    own: list[LogitsProcessor] = []
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    if presence or frequency:
        own.append(OutputPenalty(presence=presence, frequency=frequency, prompt_length=len(prompt_ids)))
    if sampling.allowed_token_ids:
        own.append(AllowedTokens(sampling.allowed_token_ids))
    return own


def _is_on(sampling: SamplingParams, name: str) -> bool:
    value = getattr(sampling, name)
    return value is not None and value != _OFF_VALUES[name]


def _is_foreign(processor: LogitsProcessor) -> bool:
    package = type(processor).__module__.partition(".")[0]
    return package != "transformers" and not isinstance(processor, OutputPenalty | AllowedTokens)


def _left(own: Mapping[type, bool], kind: type, value: float | None, neutral: float) -> float:
    return neutral if kind not in own or value is None else value
