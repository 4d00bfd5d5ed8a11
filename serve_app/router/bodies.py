"""How routes read a body and check what it says of the model."""

import asyncio
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from serve_app.protocol.errors import UnknownModel
from serve_app.protocol.parsing import parse_body, shorten
from serve_app.router.edge import read_body
from serve_app.settings import AppSettings, LimitSettings

Body = TypeVar("Body", bound=BaseModel)

INLINE_BYTES = 64 * 1024
"""Longer bodies are parsed in a thread: this many take milliseconds, which every stream of a router would feel."""

REF_TEMPLATE = "#/components/schemas/{model}"


async def read(model: type[Body], request: Request, limits: LimitSettings) -> Body:
    """Gives the body as a `model`; raises BodyTooLarge and InvalidRequest."""
    raw = await read_body(request, limit_bytes=limits.max_body_bytes)
    parse = partial(parse_body, model, raw, max_depth=limits.max_json_depth)
    return parse() if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse)


def check_model(name: str | None, settings: AppSettings) -> None:
    """Raises UnknownModel for a name that is not that of the model served."""
    if name is not None and name != settings.model_name:
        raise UnknownModel(f"the model {shorten(name)} is not served here; the one that is: {settings.model_name!r}")


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Says in the OpenAPI document what a route reads: it does so itself, so that errors have OpenAI's shape."""
    content = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}
