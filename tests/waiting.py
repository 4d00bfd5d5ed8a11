"""Waiting for what happens elsewhere, in place of sleeping for as long as it might take."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0
"""For anything that is waited for; a replica starts in about ten seconds on two busy cores."""


async def eventually(
    look: Callable[[], Any], *, until: Callable[[Any], Any] = bool, deadline_s: float = DEADLINE_S
) -> Any:
    """Gives the first result, or what it awaits, that satisfies `until`; fails with the last one after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        found = look()
        result = await found if inspect.isawaitable(found) else found
        if until(result):
            return result
        assert time.monotonic() < end, f"not within {deadline_s} s; the last was {result!r}"
        await asyncio.sleep(0.02)
