"""What values a parameter takes: each check gives the value in its one form, or refuses it by name.

Standard library only. A check is called with the name and the value of a parameter that is set.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from typing import Any, NoReturn

from engine.errors import InvalidRequest

Check = Callable[[str, Any], Any]


def number(*, minimum: float, maximum: float = inf, excluding: tuple[float, ...] = ()) -> Check:
    """A finite number between two bounds, as a float; `excluding` takes the bounds themselves out."""
    bounds = f"at least {minimum:g}" if maximum == inf else f"between {minimum:g} and {maximum:g}"
    exclusion = f", but not {' or '.join(f'{value:g}' for value in excluding)}" if excluding else ""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            _refuse(name, value, "it must be a finite number")
        if not minimum <= value <= maximum or value in excluding:
            _refuse(name, value, f"it must be {bounds}{exclusion}")
        return float(value)

    return check


def integer(*, minimum: int, maximum: int | None = None) -> Check:
    """An integer between two bounds."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, value, "it must be an integer")
        if value < minimum or (maximum is not None and value > maximum):
            _refuse(name, value, f"it must be {_bounds(minimum, maximum)}")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        _refuse(name, value, "it must be True or False")
    return value


def token_ids(*, minimum: int = 0) -> Check:
    """A list of token ids, as a tuple."""
    return lambda name, value: _ids(name, value, minimum)


def watermark_keys(*, maximum: int) -> Check:
    """A list of integers, one for each depth of a watermark, as a tuple."""

    def check(name: str, value: Any) -> tuple[int, ...]:
        keys = tuple(integer(minimum=0, maximum=maximum)(name, key) for key in _items(name, value, "a list of keys"))
        if not keys:
            _refuse(name, value, "it must hold at least one key")
        return keys

    return check


def one_or_more_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id or a list of them, as a tuple."""
    return _ids(name, value if isinstance(value, list | tuple) else (value,), 0)


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """A list of lists of token ids, none of which is empty, as tuples."""
    return tuple(_sequence(name, item) for item in _items(name, value, "a list of lists of token ids"))


def biased_sequences(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Token sequences and what is added to the score of their last token: a mapping or pairs, as pairs."""
    pairs = value.items() if isinstance(value, Mapping) else _items(name, value, "pairs of token ids and a bias")
    return tuple((_sequence(name, ids), _bias(name, bias)) for ids, bias in (_pair(name, pair) for pair in pairs))


def decay(name: str, value: Any) -> tuple[int, float]:
    """After how many new tokens, and by what factor a token."""
    start, factor = _pair(name, value)
    return integer(minimum=0)(name, start), number(minimum=0, excluding=(0,))(name, factor)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or a list of them, none of which is empty, as a tuple."""
    found = (value,) if isinstance(value, str) else _items(name, value, "a string or a list of strings")
    for item in found:
        if not isinstance(item, str) or not item:
            _refuse(name, value, "it must hold strings that are not empty")
    return found


def settings(kinds: Iterable[Mapping[str, Check]]) -> Check:
    """Names and values of one of several kinds, told apart by their names; as pairs in the order of the names.

    Takes a mapping, such pairs, or an object with `to_dict()`; nothing at all is of every kind.
    """
    known = tuple(kinds)

    def check(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
        value = value.to_dict() if hasattr(value, "to_dict") else value
        items = value.items() if isinstance(value, Mapping) else _items(name, value, "a mapping of names to values")
        given = dict(_pair(name, item) for item in items)
        for kind in known:
            if given.keys() <= kind.keys():
                return tuple((key, kind[key](f"{name}.{key}", given[key])) for key in sorted(given))
        choices = " or ".join(", ".join(kind) for kind in known)
        return _refuse(name, sorted(map(str, given)), f"it must be made of {choices}")

    return check


def choice(*accepted: str) -> Check:
    """One of a few words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in accepted:
            _refuse(name, value, f"it must be {' or '.join(accepted)}")
        return value

    return check


def _ids(name: str, value: Any, minimum: int) -> tuple[int, ...]:
    return tuple(_id(name, item, minimum) for item in _items(name, value, "a list of token ids"))


def _id(name: str, value: Any, minimum: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        token = operator.index(value)
    except TypeError:
        _refuse(name, value, "a token id must be an integer")
    if token < minimum:
        _refuse(name, value, f"a token id must be at least {minimum}")
    return token


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value, 0)
    if not ids:
        _refuse(name, value, "a sequence must hold at least one token id")
    return ids


def _bias(name: str, value: Any) -> float:
    if value == -inf:
        return -inf
    return float(number(minimum=-inf)(name, value))


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    items = _items(name, value, "a pair")
    if len(items) != 2:
        _refuse(name, value, "it must be a pair")
    return items[0], items[1]


def _items(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping):
        _refuse(name, value, f"it must be {wanted}")
    try:
        return tuple(value)
    except TypeError:
        _refuse(name, value, f"it must be {wanted}")


def _bounds(minimum: int, maximum: int | None) -> str:
    return f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise InvalidRequest(f"{name} is {value!r}; {why}", param=name.split(".")[0])
