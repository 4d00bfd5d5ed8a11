"""What a grammar costs to compile where the library bounds it by nothing, found before the compiler is asked.

llguidance writes `multipleOf` as an automaton with a state for each remainder: a value of 10,000 takes 20 ms, one of
99,991 takes 350 ms and 50 MB, and two of 311 and 313 in one place as much as their product. Nobody can end a thread.
Patterns that one text has to match together are proven to have one in common: 18 take 0.3 s, 22 take 8 s.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any

from serve_app.messages import Grammar, GrammarKind

MAX_MULTIPLES = 100_000
"""The sum of the values of `multipleOf`, written without their decimal points."""
MAX_COMMON = 10_000
"""Their least common multiple, where schemas are put together; each state then costs several times as much."""
MAX_TOGETHER = 12
"""Patterns that one text may have to match; 14 take 40 ms at most."""

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords of schemas by names that anybody may choose."""
_MERGING = ("anyOf", "oneOf", "$ref")
_MERGED = frozenset(
    {"additionalProperties", "items", "multipleOf", "pattern", "patternProperties", "prefixItems", "properties"}
)
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_IN_LARK = re.compile(r"%json\s*(?=\{)")


def check_cost(grammar: Grammar) -> None:
    """Raises ValueError for a grammar that would cost too much; says nothing of one that cannot be read."""
    schemas = list(_schemas(grammar))
    multiples = [[_states(value) for value in _keywords(schema, "multipleOf")] for schema in schemas]
    _check_sum(sum(map(sum, multiples)))
    for schema, values in zip(schemas, multiples, strict=True):
        if not any(_merges(each) for each in _subschemas(schema)):
            continue
        # What comes together is the compiler's to find: all may, where any schemas are put together.
        _check_common(lcm(*values))
        patterns = {value for value in _keywords(schema, "pattern") if isinstance(value, str)}
        if len(patterns) > MAX_TOGETHER:
            raise ValueError(
                f"it has {len(patterns)} patterns beside an allOf, or another keyword that puts schemas together; at"
                f" most {MAX_TOGETHER} are taken, so write the schemas out without it"
            )
    num_joined = _QUOTED.sub("", grammar.text).count("&") if grammar.kind is GrammarKind.EBNF else 0
    if num_joined >= MAX_TOGETHER:
        raise ValueError(f"it joins terminals by {num_joined} signs of &; less than {MAX_TOGETHER} are taken")


def _check_sum(total: int) -> None:
    if total > MAX_MULTIPLES:
        raise ValueError(
            f"its values of multipleOf, without decimal points, come to {total:.6g} in all; at most {MAX_MULTIPLES} are"
            " taken, so leave the largest out and check the answer"
        )


def _check_common(common: int) -> None:
    if common > MAX_COMMON:
        raise ValueError(
            f"its values of multipleOf, without decimal points, have {common:.6g} as least common multiple beside an"
            " allOf, or another keyword that puts schemas together; at most"
            f" {MAX_COMMON} is taken, so use fewer different ones"
        )


def _schemas(grammar: Grammar) -> Iterator[Any]:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        starts = [0]
    elif grammar.kind in (GrammarKind.LARK, GrammarKind.EBNF):
        starts = [match.end() for match in _IN_LARK.finditer(grammar.text)]
    else:
        return
    decoder = json.JSONDecoder(parse_float=Decimal)
    for start in starts:
        try:
            yield decoder.raw_decode(grammar.text, start)[0]
        except (ValueError, ArithmeticError, RecursionError):
            # The compiler says better what is wrong with it.
            continue


def _keywords(root: Any, name: str) -> Iterator[Any]:
    return (schema[name] for schema in _subschemas(root) if name in schema)


def _merges(schema: dict[str, Any]) -> bool:
    parts = schema.get("allOf")
    num_others = sum(name in schema for name in _MERGING) + (len(parts) if isinstance(parts, list) else 0)
    # pydantic writes an allOf of one beside a title, which puts nothing together.
    return num_others > 1 or (num_others == 1 and not _MERGED.isdisjoint(schema))


def _subschemas(root: Any) -> Iterator[dict[str, Any]]:
    """Gives every schema within one, and nothing that is data; a property may have any keyword for its name."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, list):
            waiting.extend(schema)
        if not isinstance(schema, dict):
            continue
        yield schema
        for keyword, value in schema.items():
            if keyword in _NAMED and isinstance(value, dict):
                waiting.extend(value.values())
            elif keyword not in _DATA:
                waiting.append(value)


def _states(value: Any) -> int:
    """Gives the digits of a value as one number, which the library counts its remainders by."""
    if not isinstance(value, int | Decimal):
        return 1
    if isinstance(value, int):
        return max(1, abs(value))
    _, digits, exponent = value.normalize().as_tuple()
    assert isinstance(exponent, int), "JSON's floats are finite, and the constants of Python's reader are no Decimals"
    number = int("".join(map(str, digits)))
    # Nothing of a client's exponent is computed that has thousands of digits.
    zeros: int = 10 ** min(max(0, exponent), 9)
    return max(1, number * zeros)
