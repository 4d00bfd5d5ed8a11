"""The routes that turn text into tokens and back, and the one that ends a request by its id."""

from fastapi import APIRouter, Request

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

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Tokenized:
        body = await read(TokenizeBody, request, settings.limits)
        check_model(body.model, settings)
        if body.messages is not None:
            ids = await service.chat_ids(body.messages, **body.template_options())
        else:
            adds = body.add_special_tokens is not False
            ids = await service.text_ids(body.prompt or "", add_special_tokens=adds)
        limits = await service.fleet.limits()
        shown = [service.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=limits.max_model_len, tokens=ids, token_strs=shown)

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Detokenized:
        body = await read(DetokenizeBody, request, settings.limits)
        check_model(body.model, settings)
        vocab_size = (await service.fleet.limits()).vocab_size
        for index, token_id in enumerate(body.tokens):
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"tokens[{index}] is {token_id}; ids of this model are 0 to {vocab_size - 1}", "tokens"
                )
        return Detokenized(prompt=service.tokenizer.decode(body.tokens, skip_special_tokens=False))

    @routes.post("/v1/abort", openapi_extra=body_of(AbortBody))
    async def abort(request: Request) -> Aborted:
        body = await read(AbortBody, request, settings.limits)
        owner = caller_of(request).owner
        found = service.in_flight.abort(body.request_id, owner)
        # Another router may have it.
        return Aborted(num_aborted=found or await service.fleet.abort(body.request_id, owner))

    return routes
