"""A replica that is drained, or tries a request alone, has no other."""

import pytest

from engine import GenerationOutput, SamplingParams, WeightSpan
from serve_app import door as door_module
from serve_app.door import Door
from serve_app.messages import GenerateRequest
from serve_app.protocol.errors import ReplicaDraining
from serve_app.streams import TokenStream


def opened(streams: dict[str, TokenStream], name: str) -> TokenStream:
    streams[name] = TokenStream(GenerateRequest(name, [1], SamplingParams(max_new_tokens=9)), replica_id="r")
    return streams[name]


async def test_a_drained_replica_hands_over_what_it_has_and_takes_nothing() -> None:
    streams: dict[str, TokenStream] = {}
    door = Door(streams, replica_id="r")
    door.enter(GenerateRequest("a", [1]))
    stream = opened(streams, "a")
    stream.deliver(GenerationOutput("a", new_tokens=[3], weight_versions=(WeightSpan(1, 0, 1),)))
    door.drain()
    assert door.is_closed
    with pytest.raises(ReplicaDraining, match="r is drained"):
        await stream.read()
    with pytest.raises(ReplicaDraining):
        door.enter(GenerateRequest("b", [1]))
    door.undrain()
    door.enter(GenerateRequest("b", [1]))


async def test_a_request_is_alone_for_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: dict[str, TokenStream] = {}
    door = Door(streams, replica_id="r")
    other = opened(streams, "a")
    door.enter(GenerateRequest("b", [1], is_alone=True))
    opened(streams, "b")
    assert door.is_closed
    with pytest.raises(ReplicaDraining, match="alone"):
        await other.read()
    for request in (GenerateRequest("c", [1]), GenerateRequest("d", [1], is_alone=True)):
        with pytest.raises(ReplicaDraining, match="alone"):
            door.enter(request)
    door.leave("a")
    assert door.is_closed
    door.leave("b")
    door.enter(GenerateRequest("c", [1]))
    # A fleet of one cannot wait for ever.
    door.enter(GenerateRequest("e", [1], is_alone=True))
    monkeypatch.setattr(door_module.time, "monotonic", lambda: 1e12)
    door.enter(GenerateRequest("f", [1]))


async def test_the_rest_of_a_request_counts_its_places_from_the_start() -> None:
    request = GenerateRequest(
        "r", [1], SamplingParams(max_new_tokens=9, num_return_sequences=3), resumed=((5, 6), None, (7,))
    )
    stream = TokenStream(request, replica_id="r")
    assert stream.open_ids == ["r", "r__child#1"]
    stream.deliver(GenerationOutput("r__child#1", new_tokens=[8, 9], weight_versions=(WeightSpan(4, 1, 3),)))
    event = await stream.read()
    assert (event.index, event.token_ids, event.weight_versions) == (2, [8, 9], (WeightSpan(4, 1, 3),))
    assert request.num_sequences == 2
    assert request.num_resumed_tokens == stream.num_resumed_tokens == 3
