import asyncio
import threading
from time import monotonic

import pytest

from engine.errors import DuplicateRequest
from engine.outbox import Outbox
from engine.request import GenerationOutput, RequestStatus


def output(request_id: str, *tokens: int, ended: bool = False) -> GenerationOutput:
    status = RequestStatus.FINISHED if ended else RequestStatus.DECODING
    return GenerationOutput(request_id, new_tokens=list(tokens), status=status)


def test_a_reader_of_one_request_leaves_the_others_in_their_order() -> None:
    outbox = Outbox()
    outbox.deliver([output("a", 1), output("b", 2), output("c", 3)])
    assert [outbox.take(name, 0).request_id for name in ("b", None, None)] == ["b", "a", "c"]  # type: ignore[union-attr]


def test_unread_outputs_of_a_request_become_one_that_has_all_that_is_new() -> None:
    outbox = Outbox()
    outbox.deliver([output("a", 1)])
    outbox.deliver([output("a", 2, 3, ended=True)])
    taken = outbox.take("a", 0)
    assert taken is not None
    assert taken.new_tokens == [1, 2, 3]
    assert outbox.take("a", 0) is None


def test_a_waiting_reader_wakes_for_its_request_and_at_the_close() -> None:
    outbox = Outbox()
    outbox.open()
    taken: list[GenerationOutput | None] = []
    readers = [
        threading.Thread(target=lambda name=name: taken.append(outbox.take(name, 10))) for name in ("a", "never")
    ]
    for reader in readers:
        reader.start()
    outbox.deliver([output("other", 9), output("a", 1)])
    readers[0].join(10)
    outbox.close()
    readers[1].join(10)
    assert [item and item.request_id for item in taken] == ["a", None]


def test_a_reader_gives_up_at_its_timeout() -> None:
    outbox = Outbox()
    outbox.open()
    started = monotonic()
    assert outbox.take("a", 0.05) is None
    assert monotonic() - started >= 0.05


async def test_one_step_wakes_a_loop_once_and_a_raising_callback_hurts_nobody() -> None:
    outbox, seen = Outbox(), []
    loop = asyncio.get_running_loop()
    wakeups = 0
    original = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wakeups
        wakeups += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    def raising(item: GenerationOutput) -> None:
        raise ValueError(item.request_id)

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign,assignment]
    try:
        outbox.register("bad", raising, loop)
        outbox.register("good", seen.append, loop)
        outbox.deliver([output("bad", 1, ended=True), output("good", 2, ended=True)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        loop.call_soon_threadsafe = original  # type: ignore[method-assign]
    assert wakeups == 1
    assert [item.request_id for item in seen] == ["good"]


def test_handlers_in_several_loops_are_served_and_a_closed_one_is_named() -> None:
    outbox, seen = Outbox(), []
    live, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    try:
        outbox.register("live", seen.append, live)
        outbox.register("gone", seen.append, closed)
        assert outbox.deliver([output("gone", 1), output("live", 2)]) == ["gone"]
        live.run_until_complete(asyncio.sleep(0))
    finally:
        live.close()
    assert [item.request_id for item in seen] == ["live"]


async def test_a_second_handler_cannot_take_the_outputs_of_a_request_away() -> None:
    outbox, seen = Outbox(), []
    loop = asyncio.get_running_loop()
    outbox.register("a", seen.append, loop)
    with pytest.raises(DuplicateRequest, match="'a'"):
        outbox.register("a", seen.append, loop)
    outbox.deliver([output("a", 1, ended=True)])
    await asyncio.sleep(0)
    assert len(seen) == 1
    outbox.register("a", seen.append, loop)
