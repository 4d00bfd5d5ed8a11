"""What a grammar costs to compile where the library bounds it by nothing, found before the compiler is asked.

llguidance writes `multipleOf` as an automaton with a state for each remainder: a value of 10,000 takes 20 ms, one of
99,991 takes 350 ms and 50 MB, and two of 311 and 313 in one place as much as their product. Nobody can end a thread.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any

from serve_app.messages import Grammar, GrammarKind

MAX_MULTIPLES = 10_000
"""Of the values of `multipleOf`, written without their decimal points: their sum, and what they have in common."""

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords of schemas by names that anybody may choose."""
_IN_LARK = re.compile(r"%json\s*(?=\{)")


def check_cost(grammar: Grammar) -> None:
    """Raises ValueError for a grammar whose `multipleOf` costs too much; says nothing of one that cannot be read."""
    multiples = [_states(value) for schema in _schemas(grammar) for value in _multiples(schema)]
    total, common = sum(multiples), lcm(*multiples)
    if total > MAX_MULTIPLES:
        raise ValueError(
            f"its values of multipleOf, without decimal points, come to {total:.6g} in all; at most {MAX_MULTIPLES} are"
            " taken, so leave the largest out and check the answer"
        )
    if common > MAX_MULTIPLES:
        raise ValueError(
            f"its values of multipleOf, without decimal points, have {common:.6g} as least common multiple; at most"
            f" {MAX_MULTIPLES} is taken, so use fewer different ones"
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


def _multiples(root: Any) -> Iterator[int | Decimal]:
    """Gives every value of `multipleOf` that is a keyword, and not the name of a property or data."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, list):
            waiting.extend(schema)
        if not isinstance(schema, dict):
            continue
        for keyword, value in schema.items():
            if keyword == "multipleOf" and isinstance(value, int | Decimal):
                yield value
            elif keyword in _NAMED and isinstance(value, dict):
                waiting.extend(value.values())
            elif keyword not in _DATA:
                waiting.append(value)


def _states(value: int | Decimal) -> int:
    """Gives the digits of a value as one number, which the library counts its remainders by."""
    if isinstance(value, int):
        return max(1, abs(value))
    _, digits, exponent = value.normalize().as_tuple()
    assert isinstance(exponent, int), "JSON's floats are finite, and the constants of Python's reader are no Decimals"
    number = int("".join(map(str, digits)))
    # Nothing of a client's exponent is computed that has thousands of digits.
    zeros: int = 10 ** min(max(0, exponent), 9)
    return max(1, number * zeros)
