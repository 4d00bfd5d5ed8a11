"""Where a stream was cut, as a router that did not see it has to know to go on with it exactly."""

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from engine import InvalidRequest, WeightSpan
from serve_app.messages import TokenEvent

MAX_TOKEN_BYTES = 2**20
"""Of a written point before it is unpacked, and sixteen times as many after it."""
MAX_NUMBERS = 2**18
"""In the points of a request, about one a token. Reading so many takes a tenth of a second; millions would fit."""
LEAST_SEED = -(2**63)
"""Seeds are signed numbers of 64 bits, as clients write them; what else a point holds counts from 0."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What the answers to one prompt have so far. It holds no secret, and gives nothing that a prompt would not give.

    seed: the one that was drawn with. tokens: of each output so far; None for one that has ended. spans: the weight
    versions over these. The request that brings it has to be the one that was cut, whole.
    """

    seed: int
    tokens: tuple[tuple[int, ...] | None, ...]
    spans: tuple[tuple[WeightSpan, ...], ...] = ()
    first_version: int | None = None
    """Of the weights that drew the first token, as far as that is known."""

    @property
    def version(self) -> int | None:
        """Of the weights that drew the latest token, as far as can be told."""
        return max((spans[-1].version for spans in self.spans if spans), default=self.first_version)

    @property
    def has_ended(self) -> bool:
        """True where no output goes on."""
        return all(ids is None for ids in self.tokens)

    @property
    def has_tokens(self) -> bool:
        return any(self.tokens) or None in self.tokens


@dataclass(slots=True)
class ResumeTrail:
    """Follows the events of one request, so that it can be resumed."""

    seed: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    spans: dict[int, list[WeightSpan]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    @classmethod
    def starting_at(cls, point: ResumePoint) -> "ResumeTrail":
        """Gives the trail of a request that goes on from a point."""
        tokens = {index: list(ids or ()) for index, ids in enumerate(point.tokens)}
        ended = {index for index, ids in enumerate(point.tokens) if ids is None}
        return cls(point.seed, tokens, {index: list(spans) for index, spans in enumerate(point.spans)}, ended)

    def add(self, event: TokenEvent) -> None:
        """Takes in an event as the handle of an application gives it."""
        self.seed = self.seed if event.seed is None else event.seed
        self.tokens.setdefault(event.index, []).extend(event.token_ids)
        self._add_spans(self.spans.setdefault(event.index, []), event.weight_versions)
        if event.finish_reason is not None:
            self.ended.add(event.index)

    def point(self, num_sequences: int) -> ResumePoint | None:
        """Gives the point of now; None before the first event, when there is nothing to go on from."""
        if self.seed is None:
            return None
        return ResumePoint(
            self.seed,
            tuple(None if index in self.ended else tuple(self.tokens.get(index, ())) for index in range(num_sequences)),
            tuple(tuple(self.spans.get(index, ())) for index in range(num_sequences)),
        )

    def _add_spans(self, known: list[WeightSpan], spans: Sequence[WeightSpan]) -> None:
        for span in spans:
            # One for each event would make a point four times as long.
            if known and known[-1].version == span.version and not span.is_recomputed:
                known[-1] = replace(known[-1], end=span.end)
            else:
                known.append(span)


def write_points(points: Sequence[ResumePoint], prompts: Sequence[Sequence[int]]) -> str | None:
    """Gives the points of one request, one for each of its prompts, as a text for URLs and JSON.

    None where they hold more than would be read again: MAX_NUMBERS, and MAX_TOKEN_BYTES as text.
    """
    # Before it is written, which of millions would take seconds.
    if sum(len(ids or ()) for point in points for ids in point.tokens) > MAX_NUMBERS:
        return None
    told = {
        "format": FORMAT,
        "prompts": _digest(prompts),
        "points": [
            {
                "seed": point.seed,
                "tokens": point.tokens,
                "first_version": point.first_version,
                "spans": [[(span.version, span.start, span.end) for span in spans] for spans in point.spans],
            }
            for point in points
        ],
    }
    written = json.dumps(told, separators=(",", ":")).encode()
    if _has_too_many_numbers(written):
        return None
    text = base64.urlsafe_b64encode(zlib.compress(written)).decode()
    return text if len(text) <= MAX_TOKEN_BYTES else None


def read_points(text: str, prompts: Sequence[Sequence[int]]) -> list[ResumePoint]:
    """Gives the points that a text holds; raises InvalidRequest where it is none or of other prompts."""
    try:
        if len(text) > MAX_TOKEN_BYTES:
            raise ValueError("it is too long")
        unpacker = zlib.decompressobj()
        packed = base64.b64decode(text, altchars=b"-_", validate=True)
        written = unpacker.decompress(packed, 16 * MAX_TOKEN_BYTES)
        if _has_too_many_numbers(written):
            raise ValueError(f"it holds more than {MAX_NUMBERS} numbers")
        told = json.loads(written)
        if told["format"] != FORMAT:
            raise ValueError("it is of another release")
        points = [
            ResumePoint(
                _number(point["seed"], least=LEAST_SEED),
                tuple(None if ids is None else tuple(_number(token) for token in ids) for ids in point["tokens"]),
                tuple(
                    tuple(WeightSpan(_number(version), _number(start), _number(end)) for version, start, end in spans)
                    for spans in point["spans"]
                ),
                None if point["first_version"] is None else _number(point["first_version"]),
            )
            for point in told["points"]
        ]
        digest = told["prompts"]
        if any(point.spans and len(point.spans) != len(point.tokens) for point in points):
            raise ValueError("its spans are not those of its outputs")
    except (ValueError, TypeError, KeyError, binascii.Error, zlib.error, RecursionError) as error:
        raise InvalidRequest(f"resume.token cannot be read: {error}; send it as it was given", "resume") from None
    if digest != _digest(prompts) or len(points) != len(prompts):
        raise InvalidRequest("resume.token is of another prompt; send the request that was cut again, whole", "resume")
    return points


def check_some_go_on(points: Sequence[ResumePoint]) -> None:
    """Raises InvalidRequest where every output of every prompt has ended."""
    if all(point.has_ended for point in points):
        raise InvalidRequest("resume says that every output has ended; there is nothing to go on with", "resume")


def check_point(point: ResumePoint, *, num_outputs: int, vocab_size: int, max_new_tokens: int) -> None:
    """Raises InvalidRequest where an answer of this kind cannot go on from the point."""
    if len(point.tokens) != num_outputs or len(point.spans) not in (0, num_outputs):
        raise InvalidRequest(
            f"resume has {len(point.tokens)} outputs of a prompt, and {num_outputs} are asked for; send the request"
            " that was cut again, whole",
            "resume",
        )
    for ids in point.tokens:
        if len(ids or ()) >= max_new_tokens:
            raise InvalidRequest(
                f"resume has {len(ids or ())} tokens of an output of at most {max_new_tokens}, so it has ended; where"
                " others have not, null among token_ids says so",
                "resume",
            )
        wrong = next((token for token in ids or () if type(token) is not int or not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"resume has the token {wrong!r:.40}; ids are 0 to {vocab_size - 1}", "resume")


def extended(points: Sequence[ResumePoint], token_ids: Sequence[Sequence[int] | None]) -> list[ResumePoint]:
    """Gives the points with what each choice has had since, by the choices of all prompts together; None has ended.

    Raises InvalidRequest where there are more or fewer choices, or one that has ended got tokens.
    """
    num_choices = sum(len(point.tokens) for point in points)
    if len(token_ids) != num_choices:
        raise InvalidRequest(
            f"resume.token_ids has {len(token_ids)} lists, and there are {num_choices} choices; give one for each",
            "resume",
        )
    later = iter(token_ids)
    return [_extended(point, [next(later) for _ in point.tokens]) for point in points]


def _extended(point: ResumePoint, later: Sequence[Sequence[int] | None]) -> ResumePoint:
    tokens = tuple(_joined(ids, more) for ids, more in zip(point.tokens, later, strict=True))
    spans = point.spans or ((),) * len(tokens)
    longer = tuple(_up_to(len(ids or ()), of_one, point.version) for ids, of_one in zip(tokens, spans, strict=True))
    return replace(point, tokens=tokens, spans=longer)


def _up_to(end: int, spans: tuple[WeightSpan, ...], version: int | None) -> tuple[WeightSpan, ...]:
    if spans:
        return (*spans[:-1], replace(spans[-1], end=max(end, spans[-1].end)))
    return (WeightSpan(version, 0, end),) if version is not None and end else ()


def _joined(before: tuple[int, ...] | None, later: Sequence[int] | None) -> tuple[int, ...] | None:
    if before is None and later:
        raise InvalidRequest("resume.token_ids has tokens of a choice that had ended", "resume")
    return None if before is None or later is None else (*before, *later)


def _has_too_many_numbers(written: bytes) -> bool:
    return written.count(b",") > MAX_NUMBERS


def _number(value: object, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**64:
        raise ValueError(f"{value!r:.40} is no number of it")
    return value


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    text = json.dumps([list(ids) for ids in prompts], separators=(",", ":"))
    return blake2b(text.encode(), digest_size=12).hexdigest()
