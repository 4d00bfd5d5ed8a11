"""Work that has to reach its end though its caller goes away: a client that hangs up, a call that timed out."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")
_RUNNING: set[asyncio.Task[Any]] = set()
"""The event loop holds tasks weakly only."""


async def run_uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Gives the result of `work`, which goes on when the caller is cancelled.

    It runs in an empty context, because Ray Serve ends the calls made in the context of a request together with it.
    """
    task = asyncio.get_running_loop().create_task(work, context=Context())
    _RUNNING.add(task)
    task.add_done_callback(_finished)
    return await asyncio.shield(task)


def _finished(task: asyncio.Task[Any]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled():
        # Asked for here, so that an error nobody waits for any more is not reported as never retrieved.
        task.exception()
