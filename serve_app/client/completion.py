"""A finished prompt, whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine import WeightSpan
from serve_app.messages import TokenEvent


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished prompt of a batch. weight_versions are spans over token_ids, in order and without gaps."""

    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: tuple[WeightSpan, ...] = ()
    finish_reason: str | None = None
    num_cached_tokens: int = 0


def join_events(events: Sequence[TokenEvent]) -> Completion:
    """Gives all that the events of one request have brought."""
    spans: list[WeightSpan] = []
    for span in (span for event in events for span in event.weight_versions):
        is_same = bool(spans) and spans[-1].version == span.version and not span.is_recomputed
        spans.append(replace(spans.pop(), end=span.end) if is_same else span)
    return Completion(
        text="".join(event.text for event in events),
        prompt_ids=events[0].prompt_ids,
        token_ids=[token_id for event in events for token_id in event.token_ids],
        logprobs=[logprob for event in events for logprob in event.logprobs],
        weight_versions=tuple(spans),
        finish_reason=events[-1].finish_reason,
        num_cached_tokens=max(event.num_cached_tokens for event in events),
    )
