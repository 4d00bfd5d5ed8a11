"""Streams that outlive the router that answers them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine import PitstopError
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import NoReplica, ReplicaLost
from serve_app.resume_point import ResumePoint, ResumeTrail
from serve_app.router.handle_stream import HandleStream

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
"""The wait doubles between these while nothing comes."""
MAX_ATTEMPTS = 10
"""In a row without an event: about half a minute, in which Serve starts another router."""


async def resumed_stream(
    ask: Callable[..., Any], resume: ResumePoint | None, *, num_sequences: int, timeout_s: float
) -> AsyncGenerator[TokenEvent, None]:
    """Gives the events of one request; ask(resume=...) opens what is left of it, and timeout_s is for all of it.

    A router that dies ends its streams with ReplicaLost; then nobody may be there for a while.
    """
    opened_at = asyncio.get_running_loop().time()
    trail = ResumeTrail() if resume is None else ResumeTrail.starting_at(resume)
    is_lost, num_failures = False, 0
    while True:
        point = trail.point(num_sequences)
        num_open = num_sequences - len(trail.ended)
        stream = HandleStream(ask(resume=point), timeout_s=timeout_s, opened_at=opened_at, num_sequences=num_open)
        try:
            async for event in stream:
                trail.add(event)
                num_failures = 0
                yield event
            return
        except PitstopError as error:
            is_lost = is_lost or isinstance(error, ReplicaLost)
            num_failures += 1
            if not is_lost or not isinstance(error, ReplicaLost | NoReplica) or num_failures > MAX_ATTEMPTS:
                raise
            logger.info("stream goes on at another router tokens=%d", sum(map(len, trail.tokens.values())))
        finally:
            stream.close()
        await asyncio.sleep(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (num_failures - 1)))
