"""Clients of a fleet whose weights change, and what has to hold of it afterwards.

The weights of a folder always draw one token, so that a wrong span shows in the answer.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine import PitstopError, SamplingParams
from serve_app.client import Pitstop
from serve_app.messages import FleetStatus, SwapResult
from serve_app.protocol.errors import NoReplica
from tests.serve_app.running_app import APP_NAME, clients_beside
from tests.serve_app.tiny_model import make_folder_that_draws
from tests.waiting import eventually

TOKENS = (40, 50, 60)
"""Drawn by the weights of the three folders."""
DEADLINE_S = 120.0


def make_folders(root: Path) -> list[str]:
    """Gives a folder of weights for each of TOKENS."""
    return [make_folder_that_draws(token, root / str(token)) for token in TOKENS]


@dataclass
class Clients:
    """Streams, one after another in each of `number` places, until told to end; looks at every token."""

    llm: Pitstop
    number: int
    length: int = 200
    outcomes: Counter[str] = field(default_factory=Counter)
    drawn: dict[int, set[int]] = field(default_factory=dict)
    """Tokens that each version drew; one only, or a span was wrong."""
    is_over: bool = False

    async def run(self, place: int) -> None:
        """Fails on a gap in the spans, and where anything ends a stream that has begun."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.length, eos_token_ids=())
        while not self.is_over:
            try:
                await asyncio.wait_for(self._stream([place % 256] * 20, sampling), DEADLINE_S)
            except NoReplica as error:
                self.outcomes[type(error).__name__] += 1
                # Nobody may be there for a while.
                await asyncio.sleep(0.1)

    async def _stream(self, prompt: list[int], sampling: SamplingParams) -> None:
        versions: list[int] = []
        async for event in self.llm.generate(prompt, sampling):
            for span in event.weight_versions:
                assert span.start == len(versions), "a gap or an overlap in the spans"
                tokens = set(event.token_ids[span.start - event.weight_versions[0].start :][: span.end - span.start])
                self.drawn.setdefault(span.version, set()).update(tokens)
                versions += [span.version] * (span.end - span.start)
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
        assert versions == sorted(versions)
        assert len(versions) == self.length
        self.outcomes["length"] += 1


@asynccontextmanager
async def clients_of(llm: Pitstop, *, number: int = 8) -> AsyncIterator[Clients]:
    """Runs clients beside what is done inside; afterwards every version has drawn one token."""
    clients = Clients(llm, number)
    async with clients_beside(clients, number, deadline_s=DEADLINE_S):
        yield clients
    assert clients.outcomes["length"] > 0
    assert all(len(tokens) == 1 for tokens in clients.drawn.values()), clients.drawn


async def settled(llm: Pitstop, num_replicas: int = 2) -> FleetStatus:
    """Waits until so many replicas are there, all serve the committed version, and nothing stands still."""

    async def look() -> FleetStatus | str:
        try:
            return await llm.status()
        except PitstopError as error:
            return str(error)

    def is_settled(status: FleetStatus | str) -> bool:
        if isinstance(status, str) or status.swap_in_progress is not None or status.pauses:
            return False
        states = [(report.version, report.state) for report in status.replicas]
        return states == [(status.committed.version, "ready")] * num_replicas

    status = await eventually(look, until=is_settled, deadline_s=DEADLINE_S)
    assert isinstance(status, FleetStatus)
    return status


async def check_serving(llm: Pitstop, folders: Sequence[str], num_replicas: int = 2) -> None:
    """The fleet of so many replicas serves the committed weights. The first folder is what it started with."""
    before = (await settled(llm, num_replicas)).committed
    path = before.source.path if before.source is not None else folders[0]
    answers = await llm.generate_batch(
        [[number] * 5 for number in range(8)], SamplingParams(temperature=0.0, max_new_tokens=3, eos_token_ids=())
    )
    for answer in answers:
        assert not isinstance(answer, PitstopError), answer
        assert answer.token_ids == [TOKENS[folders.index(path)]] * 3
        assert [span.version for span in answer.weight_versions] == [before.version]


def processes_of(deployment: str) -> list[psutil.Process]:
    """The processes of a deployment's replicas, among those that this test has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(f"ServeReplica:{APP_NAME}:{deployment}" in part for part in process.cmdline()):
                found.append(process)
    return found


async def swap_or_error(llm: Pitstop, path: str, **options: object) -> SwapResult | PitstopError:
    try:
        return await asyncio.wait_for(llm.swap_weights(path, **options), DEADLINE_S)  # type: ignore[arg-type]
    except PitstopError as error:
        return error
