"""How far a request is: what another replica has to know to go on with it, as if nothing had happened."""

from collections.abc import Sequence
from dataclasses import replace

from engine import TopLogprobs, WeightSpan, sequence_ids
from serve_app.messages import GenerateRequest, TokenEvent

LEAST_TIME_S = 0.001
"""Of a request whose `max_time` is over: the next token then ends it."""


class Progress:
    """The outputs of one request, as its events have told them. For one event loop.

    `take` gives each event as the undisturbed request would have: under the first attempt's ids, with what belongs to
    the prompt once. `rest` gives what is left to ask for.
    """

    def __init__(self, request: GenerateRequest) -> None:
        num_sequences = request.sampling.num_return_sequences or 1
        self._request = request
        self._names = _names(request.request_id, num_sequences)
        begun = request.resumed or ((),) * num_sequences
        self._tokens: list[list[int]] = [list(ids or ()) for ids in begun]
        self._ended = {index for index, ids in enumerate(begun) if ids is None}
        known = set() if request.resume_version is None else {request.resume_version}
        self._versions: list[set[int]] = [set(known) if ids else set() for ids in begun]
        self._told: set[int] = set()
        """Sequences of which an event was given."""
        self._first: TokenEvent | None = None
        self._prompt_scores: tuple[Sequence[float], Sequence[TopLogprobs]] | None = None
        self._attempt_names = self._names
        self._just_moved = {index for index, ids in enumerate(begun) if ids}
        """Sequences of which nothing has come since they were opened elsewhere."""
        self.version = request.resume_version
        """Of the weights that drew the latest token."""
        self.num_new_tokens = 0
        """Since the latest attempt began."""

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._tokens))

    def take(self, event: TokenEvent) -> TokenEvent:
        """Notes an event of the present attempt and gives it as it is to be handed on."""
        told = [self._take(each) for each in (event, *event.more)]
        self._first = self._first or told[0]
        return replace(told[0], more=told[1:])

    def ending(self, finish_reason: str) -> TokenEvent:
        """Gives the event that ends every output that has not ended."""
        first, *more = [
            TokenEvent(name, [], finish_reason=finish_reason, index=index)
            for index, name in enumerate(self._names)
            if index not in self._ended
        ]
        return replace(first, more=more)

    def end(self, sequence_id: str) -> str:
        """Notes that nobody reads an output any more; gives what the present attempt calls it."""
        index = self._names.index(sequence_id)
        self._ended.add(index)
        return self._attempt_names[index]

    def rest(self, attempt: int, *, elapsed_s: float) -> GenerateRequest:
        """Gives the request for what is left, as another attempt; elapsed_s: since the first one."""
        request, sampling = self._request, self._request.sampling
        if sampling.max_time is not None:
            sampling = replace(sampling, max_time=max(LEAST_TIME_S, sampling.max_time - elapsed_s))
        if self._prompt_scores is not None:
            sampling = replace(sampling, prompt_logprobs=None)
        request_id = f"{request.request_id}~{attempt}"
        self._attempt_names = _names(request_id, len(self._names))
        self._just_moved = set(range(len(self._names)))
        self.num_new_tokens = 0
        resumed = tuple(None if index in self._ended else tuple(ids) for index, ids in enumerate(self._tokens))
        return replace(
            request,
            request_id=request_id,
            sampling=sampling,
            hints=replace(request.hints, waited_s=request.hints.waited_s + elapsed_s),
            resumed=resumed if any(resumed) or None in resumed else None,
            resume_version=self.version if self.num_tokens else None,
        )

    def _take(self, event: TokenEvent) -> TokenEvent:
        index = event.index
        event = replace(event, request_id=self._names[index], weight_versions=self._spans(event), more=[])
        if event.prompt_logprobs and self._prompt_scores is None:
            self._prompt_scores = (event.prompt_logprobs, event.prompt_top_logprobs)
        if self._first is not None:
            event = replace(event, num_cached_tokens=self._first.num_cached_tokens, queued_s=self._first.queued_s)
        if index not in self._told and self._prompt_scores is not None:
            event = replace(event, prompt_logprobs=self._prompt_scores[0], prompt_top_logprobs=self._prompt_scores[1])
        self._told.add(index)
        self._just_moved.discard(index)
        self._tokens[index] += event.token_ids
        self.num_new_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._ended.add(index)
        return event

    def _spans(self, event: TokenEvent) -> tuple[WeightSpan, ...]:
        """Says where keys and values of earlier weights were computed anew by those of this version."""
        spans, versions = event.weight_versions, self._versions[event.index]
        if spans:
            is_recomputed = event.index in self._just_moved and bool(versions - {spans[0].version})
            spans = (replace(spans[0], is_recomputed=is_recomputed), *spans[1:])
            versions.update(span.version for span in spans)
            self.version = spans[-1].version
        return spans


def _names(request_id: str, num_sequences: int) -> list[str]:
    """Gives the ids of the outputs by index: the request's own is the first."""
    *children, own = sequence_ids(request_id, num_sequences)
    return [own, *children]
