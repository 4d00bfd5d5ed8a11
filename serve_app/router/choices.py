"""All that one HTTP request generates: a generation for each prompt, as one stream of numbered pieces."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from serve_app.protocol.responses import Timings
from serve_app.resume_point import write_points
from serve_app.router.answer import Answer, Piece
from serve_app.router.generation import Generation
from serve_app.router.keys import ANYBODY, Caller
from serve_app.router.service import Ask, GenerationService
from serve_app.router.tenants import TenantPlace


class Choices:
    """Owns its generations: `close` ends them. Choice i is output i % n of prompt i // n.

    While it is open, its caller may abort it by any of `ids`, and it counts among what its tenant has under way.
    """

    def __init__(self, service: GenerationService, *, caller: Caller = ANYBODY, ids: tuple[str, ...] = ()) -> None:
        self._opened_at = self._primed_at = time.perf_counter()
        self._service = service
        self._caller = caller
        self._ids = ids
        self._place: TenantPlace | None = None
        self.generations: list[Generation] = []
        self.answers: list[Answer] = []
        """All of them, by index."""

    async def open(self, asks: Sequence[Ask]) -> None:
        """Opens and primes a generation for each prompt; raises what refuses any of them."""
        tenant = asks[0].hints.tenant or self._caller.owner
        self._place = self._service.tenants.enter(tenant, num_tokens=sum(len(ask.prompt_ids) for ask in asks))
        self._service.in_flight.add(self._ids, self._caller.owner, self)
        await self._open(asks)
        self._place.begin()
        self._primed_at = time.perf_counter()

    async def _open(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.generations.append(await self._service.open(ask, first_index=len(self.answers)))
            self.answers += self.generations[-1].answers
        if len(self.generations) == 1:
            await self._service.prime(self.generations[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for generation in self.generations:
                    group.create_task(self._service.prime(generation))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    @property
    def is_over(self) -> bool:
        return all(answer.is_over for answer in self.answers)

    def timings(self) -> Timings:
        """Gives how long it took until now."""
        return Timings(
            queued_s=self.answers[0].queued_s,
            first_token_s=self._primed_at - self._opened_at,
            total_s=time.perf_counter() - self._opened_at,
        )

    def prompt_ids(self, index: int) -> Sequence[int]:
        """The prompt that a choice answers; the generation's own, for reading."""
        return self.generations[self.prompt_index(index)].prompt_ids

    def prompt_index(self, index: int) -> int:
        """Which of the prompts a choice answers."""
        return index * len(self.generations) // len(self.answers)

    def resume_token(self) -> str | None:
        """Gives what it takes to go on with what has not ended, as of the pieces given so far.

        None where that is more than would be read again.
        """
        points = [generation.point() for generation in self.generations]
        return write_points(points, [generation.prompt_ids for generation in self.generations])

    @property
    def first_version(self) -> int | None:
        """The weight version of the first token of the first answer."""
        return self.generations[0].first_version

    @property
    def latest_version(self) -> int | None:
        """The newest weight version that any answer has a token of."""
        versions = [answer.latest_version for answer in self.answers]
        return max((version for version in versions if version is not None), default=None)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Gives the pieces as they come; those of one answer are in order."""
        if len(self.generations) == 1:
            async for pieces in self.generations[0]:
                for piece in pieces:
                    yield piece
            return
        async for piece in self._merged():
            yield piece

    def close(self) -> None:
        """Ends in the engine what has not ended."""
        for generation in self.generations:
            generation.close()
        self._service.in_flight.remove(self._ids, self._caller.owner, self)
        if self._place is not None:
            self._place.leave()

    def abort(self) -> None:
        """Ends all answers with what they have, as cancelled; whoever reads them is told so."""
        for generation in self.generations:
            generation.abort()

    async def _merged(self) -> AsyncIterator[Piece]:
        waiting = {asyncio.ensure_future(anext(generation)): generation for generation in self.generations}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    generation = waiting.pop(task)
                    if isinstance(task.exception(), StopAsyncIteration):
                        continue
                    pieces = task.result()
                    waiting[asyncio.ensure_future(anext(generation))] = generation
                    for piece in pieces:
                        yield piece
        finally:
            for task in waiting:
                task.cancel()
