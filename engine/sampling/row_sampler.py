"""The tokens of a step: requests of the usual kind all at once, others after their constraint and their processors.

Shapes: L rows of the step that sample, V vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.active_request import ActiveRequest
from engine.plan import PlannedRow
from engine.request import NOTHING_LEFT
from engine.sampling.drawn_step import NOT_FINITE, DrawnRows
from engine.sampling.masks import MaskFiller, StepMasks
from engine.sampling.processors import ProcessorBuilder, RowProcessors
from engine.sampling.sampler import SamplingRow, draw
from engine.sampling.stop_strings import StopStrings

_GROUP = 32
"""Rows whose processed scores are held at once; at 256,000 tokens they take 32 MB."""

logger = logging.getLogger(__name__)


class RowSampler:
    """Owns what the processors of each request remember; it goes when the request does. One thread at a time.

    A request keeps its processors through preemption. Each sample of one prompt is a request with its own.
    sees_tokens: the model's class has processors of its own, so that every request has some.
    """

    def __init__(
        self, model: PreTrainedModel, *, drop_foreign: bool = True, stop_strings: StopStrings | None = None
    ) -> None:
        self._builder = ProcessorBuilder(model, drop_foreign=drop_foreign)
        self.stop_strings = stop_strings or StopStrings()
        self.sees_tokens = self._builder.is_custom
        self._masks = MaskFiller()
        self._processors: WeakKeyDictionary[ActiveRequest, RowProcessors] = WeakKeyDictionary()

    def begin(self, rows: Sequence[PlannedRow], vocab_size: int) -> None:
        """Starts what `draw` of these rows needs and the forward pass does not."""
        self._masks.begin(rows, vocab_size)

    def catch_up(self, request: ActiveRequest) -> None:
        """Makes the processors of a request ready that has tokens already; in the thread that submits it."""
        positions = range(len(request.prompt_ids), request.num_tokens)
        if positions and "ngram_len" in dict(request.sampling.watermarking_config or {}):
            self._processors_of(request).catch_up(request.token_ids, positions)

    def draw(self, rows: Sequence[PlannedRow], logits_LV: Tensor) -> DrawnRows:
        """Draws one token for each row of the step that was begun.

        What goes wrong with the processors or the constraint of a request is its error alone.
        """
        drawn = DrawnRows()
        masks = self._masks.take()
        plain: list[int] = []
        constrained: list[int] = []
        processed: list[int] = []
        for index, row in enumerate(rows):
            if (error := masks.errors.get(row.request.request_id)) is not None:
                drawn.fail(row.request, error)
            elif row.request.needs_processors or self.sees_tokens:
                processed.append(index)
            else:
                (plain if row.request.constraint is None else constrained).append(index)
        if plain:
            plain_rows = [rows[i] for i in plain]
            plain_LV = logits_LV if len(plain) == len(rows) else logits_LV[plain]
            self._draw(drawn, plain_rows, plain_LV, [_sampling_row(row) for row in plain_rows], error=NOT_FINITE)
        for group in _groups(constrained):
            self._draw_constrained(drawn, [rows[i] for i in group], logits_LV[group], masks)
        for group in _groups(processed):
            self._draw_processed(drawn, [rows[i] for i in group], [logits_LV[i] for i in group], masks)
        return drawn

    def _draw_constrained(self, drawn: DrawnRows, rows: list[PlannedRow], logits_LV: Tensor, masks: StepMasks) -> None:
        scores_LV = masks.apply([row.request for row in rows], logits_LV)
        self._draw(drawn, rows, scores_LV, [_sampling_row(row) for row in rows], error=NOTHING_LEFT)

    def _draw_processed(self, drawn: DrawnRows, rows: list[PlannedRow], logits: list[Tensor], masks: StepMasks) -> None:
        good, scores, sampling_rows = [], [], []
        for row, logits_V in zip(rows, logits, strict=True):
            try:
                processors = self._processors_of(row.request)
                scores.append(_process(processors, row, logits_V, masks))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # a processor may raise anything, and it is this request's own
                logger.exception("processors failed request_id=%s", row.request.request_id)
                drawn.fail(row.request, f"its logits processors failed: {type(error).__name__}: {error}")
                continue
            good.append(row)
            sampling_rows.append(processors.sampling_row(row.end))
        if good:
            self._draw(drawn, good, torch.cat(scores), sampling_rows, error=NOTHING_LEFT)

    def _processors_of(self, request: ActiveRequest) -> RowProcessors:
        processors = self._processors.get(request)
        if processors is None:
            processors = self._processors[request] = self._builder.build(request)
        return processors

    def _draw(
        self,
        drawn: DrawnRows,
        rows: Sequence[PlannedRow],
        scores_LV: Tensor,
        sampling_rows: list[SamplingRow],
        *,
        error: str,
    ) -> None:
        wants_logprobs = [index for index, row in enumerate(rows) if row.request.sampling.logprobs]
        num_top = {index: rows[index].request.sampling.top_logprobs or 0 for index in wants_logprobs}
        requests = [row.request for row in rows]
        drawn.add(requests, draw(scores_LV, sampling_rows, logprob_rows=wants_logprobs, num_top=num_top), error=error)


def _process(processors: RowProcessors, row: PlannedRow, logits_V: Tensor, masks: StepMasks) -> Tensor:
    request = row.request
    if request.constraint is None:
        return processors.process(request.token_ids, row.end, logits_V)
    masked_V = masks.apply([request], logits_V[None])[0]
    # Again afterwards: some processors force a token, or make finite numbers of what is not.
    return masks.apply([request], processors.process(request.token_ids, row.end, masked_V))


def _groups(indices: list[int]) -> Iterator[list[int]]:
    return (indices[start : start + _GROUP] for start in range(0, len(indices), _GROUP))


def _sampling_row(row: PlannedRow) -> SamplingRow:
    sampling = row.request.sampling
    # All set by the manager, which fills a request from its defaults.
    assert sampling.temperature is not None
    assert sampling.top_k is not None
    assert sampling.top_p is not None
    assert sampling.seed is not None
    return SamplingRow(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=row.end,
    )
