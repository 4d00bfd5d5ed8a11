"""The routes that turn text into tokens and back, and the one that ends a request by its id."""

import asyncio
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from engine import InvalidRequest
from serve_app.protocol.text_bodies import (
    AbortBody,
    Aborted,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)
from serve_app.router.bodies import body_of, check_model, read
from serve_app.router.keys import caller_of
from serve_app.router.service import GenerationService
from serve_app.settings import AppSettings


def text_routes(service: GenerationService, settings: AppSettings) -> APIRouter:
    """Gives `/tokenize`, `/detokenize` and `/v1/abort`."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model=Tokenized, openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await read(TokenizeBody, request, settings.limits)
        check_model(body.model, settings)
        if body.messages is not None:
            ids = await service.chat_ids(body.messages, **body.template_options())
        else:
            adds = body.add_special_tokens is not False
            ids = await service.text_ids(body.prompt or "", add_special_tokens=adds)
        limits = await service.fleet.limits()

        def answer() -> Tokenized:
            shown = service.tokenizer.token_texts(ids) if body.return_token_strs else None
            return Tokenized(count=len(ids), max_model_len=limits.max_model_len, tokens=ids, token_strs=shown)

        return await _made_in_thread(answer)

    @routes.post("/detokenize", response_model=Detokenized, openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await read(DetokenizeBody, request, settings.limits)
        check_model(body.model, settings)
        vocab_size = (await service.fleet.limits()).vocab_size

        def answer() -> Detokenized:
            _check_ids(body.tokens, vocab_size)
            return Detokenized(prompt=service.tokenizer.decode(body.tokens, skip_special_tokens=False))

        return await _made_in_thread(answer)

    @routes.post("/v1/abort", openapi_extra=body_of(AbortBody))
    async def abort(request: Request) -> Aborted:
        body = await read(AbortBody, request, settings.limits)
        owner = caller_of(request).owner
        found = service.in_flight.abort(body.request_id, owner)
        # Another router may have it.
        return Aborted(num_aborted=found or await service.fleet.abort(body.request_id, owner))

    return routes


async def _made_in_thread(make: Callable[[], BaseModel]) -> Response:
    """Gives an answer made and written off the event loop: a million tokens take a second."""
    content = await asyncio.to_thread(lambda: make().model_dump_json())
    return Response(content, media_type="application/json")


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"tokens[{index}] is {token_id}; ids of this model are 0 to {vocab_size - 1}", "tokens"
            )
