"""The OpenAPI document: FastAPI's, with the bodies that routes read themselves and the one shape of all errors."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from serve_app.protocol.errors import ErrorBody
from serve_app.router.bodies import REF_TEMPLATE

DESCRIPTION = "OpenAI's API over a fleet whose weights change while it serves. Errors have OpenAI's shape."
ERRORS = {
    "4XX": "Refused: the message names the field, its value and the limit.",
    "5XX": "Not answered: no replica is ready, or the request failed.",
}


def add_document(app: FastAPI, bodies: Sequence[type[BaseModel]], *, version: str) -> None:
    """Has the application describe itself at `/openapi.json`; bodies: the models that `body_of` names."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title="Pitstop", version=version, description=DESCRIPTION, routes=app.routes)
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            described: list[type[BaseModel]] = [*bodies, ErrorBody]
            for model in described:
                schema = model.model_json_schema(ref_template=REF_TEMPLATE)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for operation in (operation for path in found["paths"].values() for operation in path.values()):
                _add_errors(operation)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to extend the document


def _add_errors(operation: dict[str, Any]) -> None:
    content = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model=ErrorBody.__name__)}}}
    responses = operation["responses"]
    responses.pop("422", None)
    for status, description in ERRORS.items():
        responses[status] = {"description": description, "content": content}
