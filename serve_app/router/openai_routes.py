"""The routes under `/v1`, plain and streaming."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from engine import EngineDead, EngineStopped, InvalidRequest, PitstopError, QueueFull
from serve_app.metrics import Recorder
from serve_app.protocol.errors import DeadlineExceeded, NoReplica, ReplicaLost, error_body
from serve_app.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest, ResumeBody
from serve_app.protocol.responses import ChatCompletion, Completion, ModelCard, ModelList
from serve_app.protocol.written import write
from serve_app.resume_point import check_some_go_on, extended, read_points
from serve_app.router.answer import Piece, TextRules
from serve_app.router.bodies import body_of, check_model, read
from serve_app.router.bounds import check_bounds, check_priority, check_prompt_scores
from serve_app.router.choices import Choices
from serve_app.router.edge import UNEXPECTED, EventStream, arrived_at, count_refusal, while_connected
from serve_app.router.formats import AnswerFormat, ChatFormat, CompletionFormat, Envelope
from serve_app.router.keys import caller_of
from serve_app.router.service import Ask, GenerationService
from serve_app.settings import AppSettings

logger = logging.getLogger("ray.serve.pitstop")

WEIGHTS_HEADER = "x-weights-version"
MAX_REQUEST_ID_LENGTH = 128
"""Of an id that answers repeat."""
RESUMABLE = (ReplicaLost, NoReplica, EngineDead, EngineStopped, QueueFull, DeadlineExceeded)
"""Errors of a stream after which it may go on elsewhere, or later."""
DONE = b"data: [DONE]\n\n"
ENGINE_NAMES = {
    "timeout_s": "timeout",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sequence_bias": "logit_bias",
    "bad_words_ids": "bad_words",
    "resumed": "resume",
}
"""What the engine calls the parameters of clients."""

Body = TypeVar("Body", bound=GenerationRequest)


def openai_routes(service: GenerationService, settings: AppSettings) -> APIRouter:
    """Gives the routes that OpenAI's clients use."""
    routes = APIRouter()
    started_at = int(time.time())

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await _read(ChatRequest, request, settings)
        with _parameters_named(prompt="messages"):
            service.style.check(body)
            most = await service.max_tokens(body)
            prompt_ids = await service.chat_ids(body.messages, body, max_tokens=most, **body.template_options())
            (ask,) = await _asks(body, [prompt_ids], service, request)
            asks = [replace(ask, grammar=service.style.grammar(body))]
            check_prompt_scores(body, len(ask.prompt_ids), settings.limits)
            parts = partial(service.style.parts, body, ask.prompt_ids)
            style = ChatFormat(_envelope("chatcmpl", body, request), service.tokenizer, parts)
            return await _answer(request, service, asks=asks, body=body, style=style)

    @routes.post("/v1/completions", response_model=Completion, openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await _read(CompletionRequest, request, settings)
        with _parameters_named(prompt="prompt"):
            most = await service.max_tokens(body)
            prompts = await service.ids_of_prompts(body.prompt, max_tokens=most)
            asks = await _asks(body, prompts, service, request)
            check_prompt_scores(body, sum(len(ask.prompt_ids) for ask in asks), settings.limits)
            if body.resume is not None:
                asks = await asyncio.to_thread(_resumed, asks, body.resume)
            style = CompletionFormat(_envelope("cmpl", body, request), service.tokenizer)
            return await _answer(request, service, asks=asks, body=body, style=style)

    @routes.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[await _card(service, settings, started_at)])

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        check_model(name, settings)
        return await _card(service, settings, started_at)

    return routes


async def _answer(
    request: Request, service: GenerationService, *, asks: Sequence[Ask], body: GenerationRequest, style: AnswerFormat
) -> Response:
    ids = {style.id, request.headers.get("x-request-id", style.id)}
    choices = Choices(service, caller=caller_of(request), ids=tuple(ids))
    is_handed_over = False
    try:
        # Before the headers, so that whatever refuses the request still has its status code.
        await while_connected(request, choices.open(asks))
        if body.stream:
            events = _events(choices, style, body, recorder=service.recorder)
            headers = _version_header(choices.first_version)
            response = EventStream(events, headers=headers, on_close=choices.close)
            is_handed_over = True
            return response
        pieces = await while_connected(request, _collect(choices))
    finally:
        if not is_handed_over:
            choices.close()
    has_logprobs = body.wants_logprobs or body.num_prompt_logprobs is not None
    content: bytes | str
    if has_logprobs:
        content = await asyncio.to_thread(lambda: write(style.whole(pieces, choices)))
    else:
        content = style.whole(pieces, choices).model_dump_json()
    return Response(content, media_type="application/json", headers=_version_header(choices.latest_version))


async def _collect(choices: Choices) -> list[Piece]:
    """Gives one piece for each choice, with all that came."""
    wholes = [Piece(index) for index in range(len(choices.answers))]
    async for piece in choices.pieces():
        wholes[piece.index].extend(piece)
    return wholes


async def _events(
    choices: Choices, style: AnswerFormat, body: GenerationRequest, *, recorder: Recorder
) -> AsyncIterator[bytes]:
    # What is resumed has begun elsewhere.
    is_resumed = isinstance(body, CompletionRequest) and body.resume is not None
    begun = set(range(len(choices.answers))) if is_resumed else set[int]()
    tells_resume = body.stream_options is not None and bool(body.stream_options.include_resume)
    shows_tokens = body.shows_tokens
    # Before any piece was given: what comes later is the client's to add.
    first_token = choices.resume_token() if tells_resume else None
    try:
        async for piece in choices.pieces():
            if piece.is_empty and not (shows_tokens and piece.token_ids):
                continue
            is_first = piece.index not in begun
            make_chunk = partial(style.chunk, piece, choices, is_first=is_first)
            # With the first tokens of an answer come the log-probabilities of its prompt, which may be a million.
            is_long = is_first and body.num_prompt_logprobs is not None
            chunk = await asyncio.to_thread(make_chunk) if is_long else make_chunk()
            if chunk is not None:
                if tells_resume and isinstance(chunk, Completion):
                    chunk.resume, tells_resume = first_token, False
                yield await asyncio.to_thread(_written_event, chunk) if is_long else _event(chunk)
                begun.add(piece.index)
        if body.wants_usage_chunk:
            yield _event(style.usage_chunk(choices))
        yield DONE
    except PitstopError as error:
        count_refusal(recorder, error)
        told = error_body(error)
        if isinstance(body, CompletionRequest) and isinstance(error, RESUMABLE):
            told.resume = choices.resume_token()
        yield _event(told)
    except Exception:
        # The headers are gone, so no handler could tell the client any more.
        logger.exception("event=unexpected_error")
        count_refusal(recorder, UNEXPECTED)
        yield _event(error_body(UNEXPECTED))


def _resumed(asks: list[Ask], resume: ResumeBody) -> list[Ask]:
    """Has each prompt's answers go on from what the client says it has; raises InvalidRequest where that is not so."""
    points = read_points(resume.token, [ask.prompt_ids for ask in asks])
    if resume.token_ids is not None:
        points = extended(points, resume.token_ids)
    check_some_go_on(points)
    return [replace(ask, resume=point) for ask, point in zip(asks, points, strict=True)]


def _event(data: BaseModel) -> bytes:
    return b"data: " + data.model_dump_json().encode() + b"\n\n"


def _written_event(data: BaseModel) -> bytes:
    return b"data: " + write(data) + b"\n\n"


async def _read(model: type[Body], request: Request, settings: AppSettings) -> Body:
    body = await read(model, request, settings.limits)
    check_model(body.model, settings)
    check_bounds(body, settings.limits)
    check_priority(body, settings)
    return body


async def _asks(
    body: GenerationRequest, prompts: Sequence[list[int]], service: GenerationService, request: Request
) -> list[Ask]:
    """Gives what is asked of each prompt: the same, so it is made once."""
    _check_min_tokens(body)
    caller = caller_of(request)
    words = body.bad_words or ()
    # A thousand words are two thousand texts.
    words_ids = await asyncio.to_thread(service.tokenizer.bad_words_ids, words) if words else []
    hints = body.workload_hints()
    rules = TextRules(
        stop_strings=tuple(body.stop or ()),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or 0,
        # A template ends its prompt where a message begins, and models then write a space that is none of its text.
        continues_prompt=not isinstance(body, ChatRequest) or bool(body.continue_final_message),
        includes_stop=bool(body.include_stop_str_in_output),
        skips_special_tokens=body.skip_special_tokens is not False,
        shown_ids=service.style.shown_ids(body) if isinstance(body, ChatRequest) else frozenset(),
    )
    ask = partial(
        Ask,
        sampling=body.sampling(words_ids),
        # What the key says of its holder counts, whatever the holder says.
        hints=hints if caller.tenant is None else replace(hints, tenant=caller.tenant),
        rules=rules,
        cache_salt=body.cache_salt,
        grammar=body.grammar(),
        min_weight_version=body.min_weight_version,
        weight_version=body.weight_version,
        timeout_s=body.timeout,
        route="chat" if isinstance(body, ChatRequest) else "completions",
        arrived_at=arrived_at(request),
    )
    return [ask(await _truncated(body, prompt_ids, service)) for prompt_ids in prompts]


def _check_min_tokens(body: GenerationRequest) -> None:
    must_call = isinstance(body, ChatRequest) and bool(body.required_tools)
    if body.min_tokens and (must_call or body.grammar() is not None):
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}, and the structure or the required call that is asked for decides where"
            " the answer ends; leave min_tokens out",
            "min_tokens",
        )


async def _truncated(body: GenerationRequest, prompt_ids: list[int], service: GenerationService) -> list[int]:
    """Gives the last tokens of a prompt, as many as the request keeps."""
    kept = body.truncate_prompt_tokens
    if kept is None:
        return prompt_ids
    if kept == -1:
        wanted = body.max_new_tokens
        kept = max(1, (await service.fleet.limits()).max_model_len - (1 if wanted is None else wanted))
    return prompt_ids[-kept:]


def _envelope(prefix: str, body: GenerationRequest, request: Request) -> Envelope:
    return Envelope(
        id=f"{prefix}-{_request_id(request)}",
        created=int(time.time()),
        model=body.model,
        returns_ids=bool(body.return_token_ids),
        returns_logprobs=body.wants_logprobs,
        returns_tops=body.num_top_logprobs > 0,
        returns_prompt_logprobs=body.prompt_logprobs is not None,
        returns_timings=bool(body.return_timings),
        counts_always=body.stream_options is not None and bool(body.stream_options.continuous_usage_stats),
        names_ids=bool(body.return_tokens_as_token_ids),
        echoes=body.echoes,
    )


def _request_id(request: Request) -> str:
    """Gives the client's own id, which need not be the only one of its kind, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= MAX_REQUEST_ID_LENGTH and given.isprintable() else uuid.uuid4().hex


@contextmanager
def _parameters_named(*, prompt: str) -> Iterator[None]:
    """Calls parameters as the endpoint does: engine and service know other names for them."""
    names = {"input_ids": prompt, "prompt": prompt} | ENGINE_NAMES
    try:
        yield
    except InvalidRequest as error:
        name = names.get(error.param or "")
        if name is not None:
            error.args = (str(error).replace(str(error.param), name, 1),)
            error.param = name
        raise


async def _card(service: GenerationService, settings: AppSettings, started_at: int) -> ModelCard:
    limits = await service.fleet.limits()
    return ModelCard(id=settings.model_name, created=started_at, max_model_len=limits.max_model_len)


def _version_header(version: int | None) -> dict[str, str]:
    return {} if version is None else {WEIGHTS_HEADER: str(version)}
