"""The tokens of one step on their way: on the device, where the next step takes them up, and then on the host.

Shapes: R rows drawn together, T tokens of the next step, P places in it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan

import torch
from torch import Tensor

from engine.active_request import ActiveRequest
from engine.errors import EngineDead
from engine.plan import PlannedRow, PromptScores, SampledToken
from engine.sampling.masks import advance
from engine.sampling.prompt_scores import ScoredPrompts
from engine.sampling.sampler import Draw, SampleResult
from engine.sampling.stop_strings import StopStrings
from engine.transfer import to_device

NOT_FINITE = "the model's scores are not finite numbers"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """What was drawn, part by part; `failed` has the errors of requests for which nothing could be."""

    parts: list[tuple[list[ActiveRequest], Draw, str]] = field(default_factory=list)
    scored: list[ScoredPrompts] = field(default_factory=list)
    failed: dict[str, SampledToken] = field(default_factory=dict)

    def add(self, requests: list[ActiveRequest], draw: Draw, *, error: str) -> None:
        """Adds one part; error: what a request is told whose row rules out every token."""
        self.parts.append((requests, draw, error))

    def fail(self, request: ActiveRequest, error: str) -> None:
        self.failed[request.request_id] = SampledToken(token=0, error=error)

    def extend(self, more: "DrawnRows") -> None:
        self.parts.extend(more.parts)
        self.scored.extend(more.scored)
        self.failed.update(more.failed)


class NewTokens:
    """The tokens of one step on the device, for the rows of the next that go on from them. It holds no request."""

    def __init__(self, drawn: DrawnRows) -> None:
        requests = [request for part, _, _ in drawn.parts for request in part]
        self._index_of = {request.request_id: index for index, request in enumerate(requests)}
        self._tokens = [draw.tokens_R for _, draw, _ in drawn.parts]

    def fill(self, input_ids_1T: Tensor, rows: Sequence[PlannedRow]) -> None:
        """Writes them into a batch whose `rows` begin with those of one token.

        A row whose request failed in the step before keeps its stand-in: nobody will look at what comes of it.
        """
        ahead = [(place, self._index_of.get(row.request.request_id)) for place, row in enumerate(rows) if row.is_ahead]
        found = [(place, index) for place, index in ahead if index is not None]
        if found:
            device = input_ids_1T.device
            places_P, sources_P = (to_device(list(column), device) for column in zip(*found, strict=True))
            input_ids_1T[0].index_copy_(0, places_P, torch.cat(self._tokens).index_select(0, sources_P))


class DrawnStep:
    """The handle of a step whose rows were drawn. On a GPU the device may be on its way there still."""

    def __init__(self, drawn: DrawnRows, stop_strings: StopStrings, device: torch.device) -> None:
        self._stop_strings = stop_strings
        self._failed = drawn.failed
        self._requests = [requests for requests, _, _ in drawn.parts]
        self._errors = [error for _, _, error in drawn.parts]
        self._draws = [draw.on_host() for _, draw, _ in drawn.parts]
        self._scored = [scored.on_host() for scored in drawn.scored]
        self._arrival = torch.Event(device) if device.type == "cuda" else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> dict[str, SampledToken]:
        """Gives the tokens by request id; those of the steps before have been appended to the requests by then."""
        if self._arrival is not None:
            try:
                self._arrival.synchronize()
            except torch.AcceleratorError as error:
                raise EngineDead(f"the device failed: {error}") from error
        samples = dict(self._failed)
        for requests, draw, message in zip(self._requests, self._draws, self._errors, strict=True):
            result = draw.result()
            errors = dict.fromkeys(result.bad_rows, NOT_FINITE) | dict.fromkeys(result.empty_rows, message)
            for row, request in enumerate(requests):
                samples[request.request_id] = (
                    SampledToken(token=0, error=errors[row]) if row in errors else self._sampled(request, result, row)
                )
        for scored in self._scored:
            for request_id, scores in scored.result().items():
                sample = samples.get(request_id, SampledToken(token=0))
                samples[request_id] = replace(sample, scores=scores, error=sample.error or _problem(scores))
        return samples

    def _sampled(self, request: ActiveRequest, result: SampleResult, row: int) -> SampledToken:
        token, stops = result.tokens[row], False
        if request.sampling.stop_strings:
            try:
                stops = self._stop_strings.complete(request, token)
            except Exception as error:  # a tokenizer may raise anything, and it is this request's own
                logger.exception("stop strings failed request_id=%s", request.request_id)
                return SampledToken(token=0, error=f"its stop strings failed: {type(error).__name__}: {error}")
        if request.constraint is not None:
            is_finished, failure = advance(request.constraint, request, token)
            if failure is not None:
                return SampledToken(token=0, error=failure)
            stops |= is_finished
        return SampledToken(token=token, logprob=result.logprobs.get(row), stops=stops, top=result.top.get(row, ()))


def _problem(scores: PromptScores) -> str | None:
    return "the model's scores of its prompt are not numbers" if any(map(isnan, scores.logprobs)) else None
