"""What a benchmark asks: prompts made up of words, or those of a file."""

import json
import random
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from serve_app.cli.failure import CommandFailed

TEXT = (
    "the of and to in is that for it was on are as with they be at one have this from or had by hot but some what there"
    " we can out other were all your when up use word how said an each she which do their time if will way about many"
    " then them would write like so these her long make thing see him two has look more day could go come did my sound"
    " no most number who over know water than call first people may down side been now find"
)
WORDS = TEXT.split()
"""Common ones, each a token of most vocabularies."""


def synthetic_prompts(number: int, *, num_words: int, seed: int, is_chat: bool) -> list[dict[str, Any]]:
    """Gives made-up prompts that share no beginning, so that no cache answers for the model."""
    draws = random.Random(seed)
    texts = [" ".join(draws.choices(WORDS, k=num_words)) for _ in range(number)]
    return [_as_prompt(text, is_chat=is_chat) for text in texts]


def read_prompts(path: Path, number: int, *, is_chat: bool) -> list[dict[str, Any]]:
    """Gives so many prompts of a file, from its start again where it is short.

    A line is a text, or JSON with `prompt` or `messages`. Raises CommandFailed.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{path} cannot be read: {error}") from error
    if not lines:
        raise CommandFailed(f"{path} holds no prompt; write one in each line")
    prompts = [_read(line, f"{path}, line {index}", is_chat=is_chat) for index, line in enumerate(lines, 1)]
    return list(islice(cycle(prompts), number))


def _read(line: str, place: str, *, is_chat: bool) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return _as_prompt(line, is_chat=is_chat)
    try:
        found = json.loads(line)
        # Half of a pair of surrogates has no bytes to be sent as.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{place} is no JSON that could be sent: {error}") from error
    if is_chat and isinstance(found.get("messages"), list):
        return {"messages": found["messages"]}
    if isinstance(found.get("prompt"), str):
        return _as_prompt(found["prompt"], is_chat=is_chat)
    wanted = "messages or prompt" if is_chat else "prompt"
    raise CommandFailed(f"{place} has no {wanted}")


def _as_prompt(text: str, *, is_chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
