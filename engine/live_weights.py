"""The weights of a running model: staged beside generation, exchanged while its loop is parked, read to be compared."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Protocol, Self, TypeVar

from transformers import PreTrainedModel

from engine.errors import EngineStopped, InvalidRequest, SwapConflict, WeightsError
from engine.loop import Hold
from engine.openmp import release_helpers
from engine.packed_weights import PackedWeights
from engine.parallel import RankGroup
from engine.rank_weights import digests_on_ranks, stage_on_ranks
from engine.weights import Paths, StagedWeights, path_list, served_digests, stage_weights

T = TypeVar("T")

IN_FLIGHT_CHOICES = ("keep", "recompute", "abort", "finish")
PINNED_CHOICES = ("finish", "end")
CHANGE_TIMEOUT_S = 60.0
"""How long who reads the weights waits for who changes them: longer than any commit."""
MAX_READS = 5
"""So often is a reading of the weights begun anew when a commit came between."""

logger = logging.getLogger(__name__)


class ParkableLoop(Protocol):
    """What swaps need of a loop."""

    @property
    def is_running(self) -> bool: ...

    def acquire_pause(self, timeout_s: float | None = None, *, hold: Hold | None = None) -> None: ...

    def release_pause(self, *, hold: Hold | None = None) -> None: ...

    def change_version(self, version: int, *, in_flight: str) -> None: ...


class LiveWeights:
    """Owns the version of a model's weights. Thread-safe.

    in_place: exchanges leave tensors where they are in memory.
    """

    loop: ParkableLoop
    """The manager's, which makes another when it starts anew."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ranks: RankGroup | None,
        packed: PackedWeights | None,
        in_place: bool,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._packed = packed
        self._in_place = in_place
        self._parks: list[ParkedLoop] = []
        self._lock = threading.RLock()
        """Held by whoever exchanges weights, and while the list of parks changes."""
        self._changes = _Changes()
        self.version = 1

    def stage(self, path: Paths, *, cast: bool = False, partial: bool = False) -> StagedWeights:
        """As the manager's `stage_weights`."""
        staged = self._stage_part(path, cast=cast) if partial else self._read(path, cast=cast, partial=False)
        self.prepare(staged)
        release_helpers()
        return staged

    def prepare(self, staged: StagedWeights) -> None:
        """Makes what depends on staged weights, beside generation."""
        if self._packed is not None:
            self._packed.prepare(staged.pairs)

    def digests(self) -> dict[str, str]:
        """As the manager's `weight_digests`."""
        self._raise_if_no_driver()
        found = self._changes.read(
            lambda: served_digests(self._model) if self._ranks is None else digests_on_ranks(self._model, self._ranks)
        )
        release_helpers()
        return found

    def park(self, *, timeout_s: float | None, in_flight: str, pinned: str) -> "ParkedLoop":
        """As the manager's `park`."""
        _check_choice("in_flight", in_flight, IN_FLIGHT_CHOICES)
        _check_choice("pinned", pinned, PINNED_CHOICES)
        self._raise_if_no_driver()
        hold = Hold(is_for_all=in_flight == "finish") if "finish" in (in_flight, pinned) else None
        loop = self.loop
        loop.acquire_pause(timeout_s, hold=hold)
        parked = ParkedLoop(self, loop, hold, in_flight)
        with self._lock:
            self._parks.append(parked)
        return parked

    def end_parks(self) -> None:
        """Resumes whatever is parked, so that the loop can end."""
        for parked in list(self._parks):
            parked.resume()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, the caller changes the weights in place; who reads them meanwhile reads them anew."""
        with self._changes.mark():
            yield

    def change_version(self, wanted: int | None, *, in_flight: str) -> None:
        """Starts a version; the caller holds a pause."""
        with self._lock:
            version = self.version + 1 if wanted is None else wanted
            self.loop.change_version(version, in_flight=in_flight)
            self.version = version

    def exchange(self, staged: StagedWeights, version: int | None, in_flight: str) -> object:
        """Commits staged weights under a version, or changes nothing; the caller holds a pause.

        Gives what is to be dropped when nobody waits.
        """
        with self._lock, self._changes.mark():
            self._check_version(version)
            if staged.based_on not in (None, self.version):
                raise SwapConflict(
                    f"these weights change a part of version {staged.based_on}, and version {self.version} is served"
                    " now; stage them again"
                )
            # All or nothing by itself: rolling back what this call did not commit would bring older weights back.
            staged.commit(in_place=self._in_place)
            try:
                self.change_version(version, in_flight=in_flight)
            except BaseException:
                staged.rollback()
                raise
            return self._packed.refresh(all_of_them=self._in_place) if self._packed is not None else None

    def forget(self, parked: "ParkedLoop") -> None:
        """Called by a park that is over."""
        with self._lock:
            self._parks.remove(parked)

    def _stage_part(self, path: Paths, *, cast: bool) -> StagedWeights:
        def read() -> StagedWeights:
            version = self.version
            staged = self._read(path, cast=cast, partial=True)
            staged.based_on = version
            return staged

        # What the source leaves out is read in the model.
        return self._changes.read(read)

    def _read(self, path: Paths, *, cast: bool, partial: bool) -> StagedWeights:
        if self._ranks is None:
            return stage_weights(self._model, path, cast=cast, partial=partial)
        self._raise_if_no_driver()
        return stage_on_ranks(self._model, path_list(path), self._ranks, cast=cast, partial=partial)

    def _raise_if_no_driver(self) -> None:
        if self._ranks is None:
            return
        if not self._ranks.is_driver:
            raise WeightsError("this rank is not the driver, which changes the weights of all ranks")
        if not self.loop.is_running:
            raise EngineStopped("the manager does not run, so the other ranks hear nothing; start() it first")

    def _check_version(self, wanted: int | None) -> None:
        if wanted is not None and wanted <= self.version:
            raise InvalidRequest(
                f"version is {wanted}; it must be above the present one, {self.version}",
                "version",
            )


class ParkedLoop:
    """A loop held between two steps, with nothing in flight, until `resume`. Any thread may call any method.

    New requests may be added meanwhile, and wait. Leaving it as a context resumes.
    """

    def __init__(self, weights: LiveWeights, loop: ParkableLoop, hold: Hold | None, in_flight: str) -> None:
        self._weights = weights
        self._loop = loop
        self._hold = hold
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._parked_at = perf_counter()
        self._paused_s: float | None = None
        self._forgotten: list[object] = []

    @property
    def is_parked(self) -> bool:
        """False once resumed."""
        return self._paused_s is None

    def commit(self, staged: StagedWeights, *, version: int | None = None, in_flight: str | None = None) -> None:
        """Exchanges the weights; generation goes on with them after `resume`.

        version and in_flight as for the manager's `commit_weights`; in_flight None is what the loop was parked with.
        When the exchange fails, the old weights are back and its error is raised; the loop stays parked.
        """
        chosen = self._in_flight if in_flight is None else in_flight
        _check_choice("in_flight", chosen, IN_FLIGHT_CHOICES)
        if chosen == "finish" and self._in_flight != "finish":
            raise InvalidRequest(
                f"in_flight is 'finish', and the loop was parked with {self._in_flight!r}, while requests ran; park it"
                " with 'finish'",
                "in_flight",
            )
        with self._lock:
            if self._paused_s is not None:
                raise EngineStopped("this park is over, and generation goes on; park again")
            self._forgotten.append(self._weights.exchange(staged, version, chosen))

    def resume(self) -> float:
        """Lets generation go on and gives the seconds that it stood still; again is the same as once."""
        with self._lock:
            if self._paused_s is None:
                self._loop.release_pause(hold=self._hold)
                self._paused_s = perf_counter() - self._parked_at
                self._weights.forget(self)
            forgotten, self._forgotten = self._forgotten, []
        del forgotten  # frees the old copies while generation goes on
        return self._paused_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.resume()


class _Changes:
    """Counts changes of the weights, so that whoever reads them knows whether they stood still."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_begun = 0
        self._num_open = 0
        self._own = threading.local()

    @contextmanager
    def mark(self) -> Iterator[None]:
        """A change is under way inside."""
        with self._changed:
            self._num_begun += 1
            self._num_open += 1
        self._own.count = self._count_own() + 1
        try:
            yield
        finally:
            self._own.count -= 1
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def read(self, reader: Callable[[], T]) -> T:
        """Gives what `reader` finds while no other thread changes the weights. Raises SwapConflict when one always
        does.
        """
        for _ in range(MAX_READS):
            with self._changed:
                if not self._changed.wait_for(lambda: self._num_open == self._count_own(), CHANGE_TIMEOUT_S):
                    break
                begun = self._num_begun
            found = reader()
            if self._num_begun == begun:
                return found
        raise SwapConflict("the weights were changed again and again while they were read; try again later")

    def _count_own(self) -> int:
        return getattr(self._own, "count", 0)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequest(f"{name} is {value!r}; it must be one of {', '.join(choices)}", name)
