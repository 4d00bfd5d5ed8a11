"""Parameters that clients send at a value which asks for nothing.

They are accepted at that value and refused by name at any other, so that an official client works unchanged and
nothing it asks for is dropped silently.
"""

from typing import Any

from engine import InvalidRequest
from serve_app.protocol.parsing import shorten

SHARED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
}

CHAT: dict[str, tuple[object, ...]] = SHARED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "service_tier": ("auto", "default"),
    "web_search_options": (),
    "prompt_cache_key": (),
    "safety_identifier": (),
    "echo": (False,),
    "chat_template": (),
}

COMPLETIONS: dict[str, tuple[object, ...]] = SHARED | {"suffix": ("",)}

ASSISTANT_MESSAGE: dict[str, tuple[object, ...]] = {
    "refusal": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
    "name": (),
}
"""What clients send back of an answer they got."""

MESSAGE: dict[str, tuple[object, ...]] = {"name": ()}

OF_ROLE = {"assistant": ASSISTANT_MESSAGE, "tool": {}}
"""Those of other roles are in MESSAGE."""


def drop_neutral(values: Any, table: dict[str, tuple[object, ...]]) -> Any:
    """Gives `values` without the table's parameters; raises InvalidRequest where one asks for something.

    null is neutral for every one of them. What is not a dict is given back: its type is refused elsewhere.
    """
    if not isinstance(values, dict):
        return values
    for name in table.keys() & values.keys():
        if not any(_is_same(values[name], neutral) for neutral in (None, *table[name])):
            raise InvalidRequest(_refusal(name, values[name], table[name]), name)
    return {name: value for name, value in values.items() if name not in table}


def _refusal(name: str, value: object, neutral: tuple[object, ...]) -> str:
    if not neutral:
        return f"{name} is {shorten(value)}; it is not supported, leave it out"
    return f"{name} is {shorten(value)}; only {' or '.join(map(repr, neutral))} is supported"


def _is_same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
