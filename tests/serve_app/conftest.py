"""Fixtures that several modules of these tests share."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.serve_app.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    """A virtual loop that is the current one, for what asks for that when it is made."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.end()
    asyncio.set_event_loop(None)
