"""What a router measures of requests from their arrival on, in virtual time: the line, the replica, the last token."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_chat_style import style_of
from tiny_model import CHAT_TEMPLATE

from engine import PitstopError, SamplingParams
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import GenerationFailed
from serve_app.router.admission import Admission
from serve_app.router.admitted_events import AdmittedEvents
from serve_app.router.answer import Answer, TextRules
from serve_app.router.generation import Generation
from serve_app.router.request_observer import RequestObserver
from serve_app.router.version_gate import VersionGate
from serve_app.routing.prospect import Prospect
from serve_app.settings import LimitSettings
from tests.serve_app.virtual_loop import VirtualLoop

ONE_AT_A_TIME = Prospect(
    first_token_s=1.0, decode_s=1.0, alone_s=0.1, token_s=0.01, num_replicas=1, room_tokens=100, room_requests=1
)
NEVER_S = 1e6


class Events:
    """What a replica sends: each event so many seconds after the one before."""

    has_moved = False

    def __init__(self, *script: tuple[float, TokenEvent | PitstopError]) -> None:
        self._script = iter(script)

    async def __anext__(self) -> TokenEvent:
        after_s, event = next(self._script)
        await asyncio.sleep(after_s)
        if isinstance(event, PitstopError):
            raise event
        return event

    def close(self) -> None:
        pass


class Router:
    """Sends one request at a time, the others wait in line."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.recorder = Recorder(ROUTER_METRICS)
        self.admission = Admission(
            LimitSettings(), max_waiting=100, recorder=self.recorder, prospect=lambda _: ONE_AT_A_TIME
        )
        nobody: Any = None
        self.gate = VersionGate(nobody, LimitSettings(), max_waiting=0, recorder=self.recorder)
        self.observer = RequestObserver(self.recorder, routing=lambda: None, clock=loop.time)
        self.tokenizer = style_of(CHAT_TEMPLATE)[0].tokenizer

    def open(
        self,
        *script: tuple[float, TokenEvent | PitstopError],
        num_sequences: int = 1,
        arrived_at: float | None = None,
        stop: str = "",
    ) -> Generation:
        request = GenerateRequest("r", [1, 2, 3], SamplingParams(num_return_sequences=num_sequences))
        events: Any = Events(*script)
        admitted = AdmittedEvents(self.admission, request, lambda _: events, gate=self.gate)
        observed = self.observer.observe(admitted, request, route="chat", arrived_at=arrived_at)
        rules = TextRules(stop_strings=(stop,) if stop else ())
        answers = [Answer(self.tokenizer, rules, index=index, prompt_ids=[1]) for index in range(num_sequences)]

        async def end_sequence(_: str) -> None:
            pass

        return Generation(observed, answers, end_sequence=end_sequence, on_end=observed.end)

    async def read(self, generation: Generation) -> None:
        try:
            await generation.prime(probe=_probe, probe_after_s=NEVER_S)
            async for _ in generation:
                pass
        finally:
            generation.close()

    def found(self) -> dict[str, list[float]]:
        """The count and the sum of the three histograms."""
        families = text_string_to_metric_families(self.recorder.expose())
        values = {sample.name: sample.value for family in families for sample in family.samples}
        names = {"first": "time_to_first_token", "queue": "queue", "whole": "generation"}
        found = {
            short: [values[f"pitstop_{name}_seconds_{suffix}"] for suffix in ("count", "sum")]
            for short, name in names.items()
        }
        return {name: pair for name, pair in found.items() if pair[0]}


async def _probe() -> None:
    raise AssertionError("nobody waits that long")


@pytest.fixture
def router(loop: VirtualLoop) -> Router:
    return Router(loop)


def seconds(value: float) -> Any:
    return pytest.approx(value, abs=0.2)  # who waits in line looks for room ten times a second


def test_the_time_in_line_is_a_part_of_every_time_that_a_client_waits(loop: VirtualLoop, router: Router) -> None:
    async def run() -> None:
        first = router.open((30.0, TokenEvent("r", [65], computed_s=1.0)), (2.0, TokenEvent("r", [], [], (), "stop")))
        # Of its 5 s at the replica it waited 3 s there.
        second = router.open((5.0, TokenEvent("r", [65], computed_s=2.0)), (4.0, TokenEvent("r", [66], [], (), "stop")))
        reading = [asyncio.ensure_future(router.read(generation)) for generation in (first, second)]
        await asyncio.sleep(10)
        assert (router.admission.num_in_line, router.admission.num_waiting) == (1, 2)
        await asyncio.gather(*reading)

    loop.run(run())
    assert router.found() == {
        "first": [2, seconds(30 + 35)],
        "queue": [2, seconds(29 + 33)],
        "whole": [2, seconds(32 + 39)],
    }


def test_time_counts_from_an_arrival_before_the_request_was_opened(loop: VirtualLoop, router: Router) -> None:
    loop.run(asyncio.sleep(50))
    script = (1.0, TokenEvent("r", [65], [], (), "stop", computed_s=0.5))
    loop.run(router.read(router.open(script, arrived_at=42.0)))
    assert router.found() == {"first": [1, seconds(9)], "queue": [1, seconds(8.5)], "whole": [1, seconds(9)]}


def test_all_sequences_of_a_prompt_are_one_request(loop: VirtualLoop, router: Router) -> None:
    both = TokenEvent("r", [], more=[TokenEvent("r/1", [65], index=1, computed_s=1.0)], computed_s=None)
    ends = TokenEvent("r", [66], [], (), "stop", computed_s=3.0)
    last = TokenEvent("r/1", [66], [], (), "stop", index=1)
    loop.run(router.read(router.open((2.0, both), (1.0, ends), (4.0, last), num_sequences=2)))
    assert router.found() == {"first": [1, seconds(2)], "queue": [1, seconds(1)], "whole": [1, seconds(7)]}


def test_an_answer_that_a_stop_string_ends_is_whole(loop: VirtualLoop, router: Router) -> None:
    ids = router.tokenizer.encode("AB")[-2:]
    script = [(1.0, TokenEvent("r", ids[:1], computed_s=0.0)), (1.0, TokenEvent("r", ids[1:]))]
    loop.run(router.read(router.open(*script, stop="AB")))
    assert router.found()["whole"] == [1, seconds(2)]


def test_what_fails_is_not_whole_and_what_never_began_waited_for_nothing_known(
    loop: VirtualLoop, router: Router
) -> None:
    failed = router.open(
        (1.0, TokenEvent("r", [65], computed_s=0.0)), (1.0, TokenEvent("r", [], [], (), "failed", "not finite"))
    )
    lost = router.open((1.0, TokenEvent("r", [65], computed_s=0.0)), (1.0, GenerationFailed("gone")))
    for generation in (failed, lost):
        with pytest.raises(GenerationFailed):
            loop.run(router.read(generation))
    assert {name: count for name, (count, _) in router.found().items()} == {"first": 2, "queue": 2}
    loop.run(router.read(router.open((1.0, TokenEvent("r", [], [], (), "cancelled")))))
    assert {name: count for name, (count, _) in router.found().items()} == {"first": 2, "queue": 2, "whole": 1}
