"""The tokens of a step: requests of the usual kind all at once, those with processors one by one before the draw.

Shapes: L rows of the step that sample, V vocabulary.
"""

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.active_request import ActiveRequest
from engine.plan import PlannedRow, SampledToken
from engine.sampling.processors import ProcessorBuilder, RowProcessors
from engine.sampling.sampler import SampleResult, SamplingRow, sample
from engine.sampling.stop_strings import StopStrings

_GROUP = 32
"""Rows whose processed scores are held at once; at 256,000 tokens they take 32 MB."""
_NOT_FINITE = "the model's scores are not finite numbers"
_NOTHING_LEFT = "no token is left to choose: the request's own settings rule out all, or the scores are not finite"

logger = logging.getLogger(__name__)


class RowSampler:
    """Owns what the processors of each request remember; it goes when the request does. One thread at a time.

    A request keeps its processors through preemption. Each sample of one prompt is a request with its own.
    """

    def __init__(
        self, model: PreTrainedModel, *, drop_foreign: bool = True, stop_strings: StopStrings | None = None
    ) -> None:
        self._builder = ProcessorBuilder(model, drop_foreign=drop_foreign)
        self._stop_strings = stop_strings or StopStrings()
        self._processors: WeakKeyDictionary[ActiveRequest, RowProcessors] = WeakKeyDictionary()

    def sample(self, rows: Sequence[PlannedRow], logits_LV: Tensor) -> dict[str, SampledToken]:
        """Draws one token for each row. What goes wrong with the processors of a request is its error alone."""
        processed = [i for i, row in enumerate(rows) if row.request.needs_processors or self._builder.is_custom]
        if not processed:
            return self._draw(rows, logits_LV, [_sampling_row(row) for row in rows], error=_NOT_FINITE)
        plain = sorted(set(range(len(rows))) - set(processed))
        plain_rows = [rows[i] for i in plain]
        samples = self._draw(
            plain_rows, logits_LV[plain], [_sampling_row(row) for row in plain_rows], error=_NOT_FINITE
        )
        for start in range(0, len(processed), _GROUP):
            group = processed[start : start + _GROUP]
            samples |= self._sample_processed([rows[i] for i in group], [logits_LV[i] for i in group])
        return samples

    def _sample_processed(self, rows: list[PlannedRow], logits: list[Tensor]) -> dict[str, SampledToken]:
        samples, good, scores, sampling_rows = {}, [], [], []
        for row, logits_V in zip(rows, logits, strict=True):
            try:
                processors = self._processors_of(row.request)
                scores.append(processors.process(row.request.token_ids, row.end, logits_V))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # a processor may raise anything, and it is this request's own
                logger.exception("processors failed request_id=%s", row.request.request_id)
                message = f"its logits processors failed: {type(error).__name__}: {error}"
                samples[row.request.request_id] = SampledToken(token=0, error=message)
                continue
            good.append(row)
            sampling_rows.append(processors.sampling_row(row.end))
        return samples | (self._draw(good, torch.cat(scores), sampling_rows, error=_NOTHING_LEFT) if good else {})

    def _processors_of(self, request: ActiveRequest) -> RowProcessors:
        processors = self._processors.get(request)
        if processors is None:
            processors = self._processors[request] = self._builder.build(request)
        return processors

    def _draw(
        self, rows: Sequence[PlannedRow], scores_LV: Tensor, sampling_rows: list[SamplingRow], *, error: str
    ) -> dict[str, SampledToken]:
        wants_logprobs = [index for index, row in enumerate(rows) if row.request.sampling.logprobs]
        result = sample(scores_LV, sampling_rows, logprob_rows=wants_logprobs)
        bad_rows = set(result.bad_rows)
        return {
            row.request.request_id: SampledToken(token=0, error=error)
            if index in bad_rows
            else self._sampled(row.request, result, index)
            for index, row in enumerate(rows)
        }

    def _sampled(self, request: ActiveRequest, result: SampleResult, index: int) -> SampledToken:
        token = result.tokens[index]
        return SampledToken(
            token=token,
            logprob=result.logprobs.get(index),
            stops=bool(request.sampling.stop_strings) and self._stop_strings.complete(request, token),
        )


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
