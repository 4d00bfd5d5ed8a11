"""The fields that ask for an answer of a given form: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine import InvalidRequest
from serve_app.messages import Grammar, GrammarKind
from serve_app.protocol.strict import Items, RequestModel

MAX_GRAMMAR_LENGTH = 128 * 1024
"""Characters of a schema, regex or grammar: an enum of 8,000 words, or 30 ms of compiling."""
MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}

_OLDER_NAMES = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Choice = Annotated[str, Field(min_length=1, max_length=4096)]


class JsonSchema(RequestModel):
    """OpenAI's wrapping of a schema. Answers follow it whether `strict` is set or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's. json_schema without a schema takes any JSON object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("json_schema goes with the type 'json_schema', and with no other", "json_schema")
        return self

    def grammar(self) -> Grammar | None:
        """Gives what answers have to follow; None for text."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return schema_grammar(ANY_OBJECT if schema is None else schema, param="response_format")


class StructuredOutputs(RequestModel):
    """vLLM's: one of json (a schema, as an object or as text), json_object, regex, choice and grammar.

    regex has to match the whole answer. grammar is GBNF (rules with "::=", from `root`) or Lark (from `start`).
    """

    # No bound here: a text that is too long would be told that it is no object.
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Annotated[Items[Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar_: GrammarText | None = Field(default=None, alias="grammar")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar_]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequest("must hold one of json, json_object, regex, choice and grammar")
        return self

    def grammar(self) -> Grammar:
        """Gives what answers have to follow."""
        param = "structured_outputs"
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex, param)
        if self.choice is not None:
            return Grammar(GrammarKind.CHOICE, json.dumps(self.choice), param)
        if self.grammar_ is not None:
            return Grammar(GrammarKind.EBNF, self.grammar_, param)
        return schema_grammar(ANY_OBJECT if self.json_ is None else self.json_, param=param)


class StructureFields(RequestModel):
    """What an answer has to look like."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_new_fields(cls, values: Any) -> Any:
        for name, field in _OLDER_NAMES.items():
            if isinstance(values, dict) and values.get(name) is not None:
                raise InvalidRequest(f'{name} is an older name; send structured_outputs={{"{field}": ...}}', name)
        return values

    @model_validator(mode="after")
    def _check_one_structure(self) -> Self:
        if self.structured_outputs is not None and self.response_format not in (None, ResponseFormat(type="text")):
            raise InvalidRequest(
                "structured_outputs and response_format both say what the answer looks like; give one",
                "structured_outputs",
            )
        return self

    def grammar(self) -> Grammar | None:
        """Gives what the answer has to follow, where something was asked for. Raises InvalidRequest for its size."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar()
        return None if self.response_format is None else self.response_format.grammar()


def schema_grammar(schema: dict[str, Any] | str, *, param: str) -> Grammar:
    """Gives the grammar of a JSON schema; raises InvalidRequest for one that is too long."""
    text = schema if isinstance(schema, str) else json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(
            f"{param} has a schema of {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are taken", param
        )
    return Grammar(GrammarKind.JSON_SCHEMA, text, param)
