"""New weights for a model that is cut over ranks: read by all of them, and taken by all or by none.

The driver asks and the other ranks answer. They read beside generation, as the driver does, and exchange between two
steps, while the driver holds its loop still.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import EngineDead, WeightsError, WeightsInvalid, WeightsSourceError
from engine.openmp import alone
from engine.parallel import Answer, Deed, RankGroup, WeightsTask
from engine.weights import Contents, Part, StagedWeights, digests_of_ranks, read_part, served_digests

logger = logging.getLogger(__name__)


class WeightsOfRanks(StagedWeights):
    """What all ranks have staged, in the hands of the driver: each of its deeds is done on every rank.

    Invariant: outside of a call all ranks are in the same state, unless one is gone, which ends the engine.
    """

    def __init__(
        self, pairs: Iterable[tuple[Tensor, Tensor]], contents: Contents, ranks: RankGroup, *, number: int
    ) -> None:
        """Takes the driver's own part, what all ranks hold, and the number under which the others have theirs."""
        super().__init__(pairs, contents)
        self._ranks = ranks
        self._number = number

    def commit(self, *, in_place: bool = False) -> None:
        assert not in_place, "steps of a cut model are not captured"
        super().commit()
        try:
            self._everywhere_else(Deed.COMMIT)
        except BaseException:
            super().rollback()
            with self._ranks.asking:
                # Nobody waits for the answers: a rank that is late obeys in order, and one that is gone never does.
                self._ranks.ask(Deed.ROLLBACK, staged=self._number)
            raise

    def rollback(self) -> None:
        super().rollback()
        self._everywhere_else(Deed.ROLLBACK)

    def discard(self) -> None:
        super().discard()
        self._everywhere_else(Deed.DISCARD)

    def _everywhere_else(self, deed: Deed) -> None:
        with self._ranks.asking:
            _raise_first(self._ranks.answers(self._ranks.ask(deed, staged=self._number)))


def stage_on_ranks(
    model: PreTrainedModel,
    paths: Sequence[str],
    ranks: RankGroup,
    *,
    cast: bool = False,
    partial: bool = False,
    rest: Callable[[], None] = lambda: None,
) -> WeightsOfRanks:
    """Gives new weights, staged on every rank; where one cannot take them, none keeps any and its error is raised.

    The driver calls it. Raises what `stage_weights` raises, and EngineDead when a rank does not answer.
    """
    with ranks.asking:
        number = ranks.ask(Deed.STAGE, paths=paths, cast=cast, partial=partial)
        try:
            part = _read_everywhere(
                lambda: read_part(model, paths, cast=cast, partial=partial, rest=rest), ranks, number
            )
        except EngineDead:
            raise
        except BaseException:
            ranks.answers(ranks.ask(Deed.DISCARD, staged=number))
            raise
    return WeightsOfRanks(part.pairs, part.contents, ranks, number=number)


def digests_on_ranks(model: PreTrainedModel, ranks: RankGroup) -> dict[str, str]:
    """Gives the digests of what all ranks serve, each made of those of its parts; the driver calls it.

    While it reads, no rank takes another task.
    """
    with ranks.asking:
        number = ranks.ask(Deed.DIGEST)
        try:
            own = served_digests(model)
        finally:
            answers = ranks.answers(number)
    _raise_first(answers)
    return digests_of_ranks([own, *(answer.digests for answer in answers)])


class RankWeights:
    """What a rank that is not the driver has staged, by number; it answers each task exactly once."""

    def __init__(self, model: PreTrainedModel, ranks: RankGroup) -> None:
        self._model = model
        self._ranks = ranks
        self._staged: dict[int, StagedWeights] = {}

    def obey(self, task: WeightsTask) -> None:
        """Does what the driver wants; called between two steps, which go on while weights are read."""
        if task.deed in (Deed.STAGE, Deed.DIGEST):
            threading.Thread(target=self._answer, args=(task,), name="pitstop-staging", daemon=True).start()
        else:
            self._answer(task)

    def _answer(self, task: WeightsTask) -> None:
        rank = self._ranks.rank
        try:
            with alone():
                answer = self._do(task)
        except Exception as error:  # noqa: BLE001  # the driver raises it
            logger.warning("weights refused deed=%s error=%r", task.deed, str(error))
            answer = Answer(rank, error=(type(error).__name__, str(error), getattr(error, "tensor", None)))
        self._ranks.answer(task.number, answer)

    def _do(self, task: WeightsTask) -> Answer:
        rank = self._ranks.rank
        if task.deed is Deed.DIGEST:
            return Answer(rank, digests=served_digests(self._model))
        if task.deed is Deed.STAGE:
            part = read_part(self._model, task.paths, cast=task.cast, partial=task.partial)
            self._staged[task.staged] = StagedWeights(part.pairs)
            return Answer(rank, part.source, dict(part.contents.digests))
        staged = self._staged.get(task.staged)
        if task.deed is Deed.COMMIT:
            if staged is None:
                raise WeightsError(f"nothing is staged here under number {task.staged}")
            staged.commit()
        elif staged is not None and task.deed is Deed.ROLLBACK:
            staged.rollback()
        elif staged is not None:
            staged.discard()
            del self._staged[task.staged]
        return Answer(rank)


def _read_everywhere(read: Callable[[], Part], ranks: RankGroup, number: int) -> Part:
    try:
        part = read()
    finally:
        # Also where it failed here: the others can drop theirs only when they have come to an end.
        answers = ranks.answers(number)
    _raise_first(answers)
    for answer in answers:
        if answer.source != part.source:
            raise WeightsSourceError(
                f"rank {answer.rank} read other files than the driver ({answer.source}, not {part.source}); stage them"
                " again when they are complete and the same for all ranks"
            )
    digests = digests_of_ranks([part.contents.digests, *(answer.digests for answer in answers)])
    return replace(part, contents=replace(part.contents, digests=digests))


def _raise_first(answers: Iterable[Answer]) -> None:
    for answer in answers:
        if answer.error is None:
            continue
        kind, message, tensor = answer.error
        message = f"rank {answer.rank}: {message}"
        if kind == WeightsInvalid.__name__:
            raise WeightsInvalid(message, tensor=tensor)
        if kind == WeightsSourceError.__name__:
            raise WeightsSourceError(message)
        raise WeightsError(f"{message} ({kind})")
