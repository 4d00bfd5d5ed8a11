"""The weights of a running model: staged beside generation, exchanged while its loop is parked, read to be compared."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from time import perf_counter
from types import TracebackType
from typing import Protocol, Self, TypeVar

from transformers import PreTrainedModel

from engine.errors import EngineDead, EngineStopped, InvalidRequest, SwapConflict, WeightsError, WeightsLost
from engine.loop import Hold
from engine.openmp import alone
from engine.pacing import Pace
from engine.packed_weights import PackedWeights
from engine.parallel import RankGroup
from engine.patience import Patience
from engine.probing import probe
from engine.rank_weights import digests_on_ranks, stage_on_ranks
from engine.room import Room
from engine.weights import (
    Paths,
    StagedWeights,
    bytes_beside,
    marks_of,
    path_list,
    read_part,
    served_digests,
    stage_streamed,
)

T = TypeVar("T")

IN_FLIGHT_CHOICES = ("keep", "recompute", "abort", "finish")
PINNED_CHOICES = ("finish", "end")
MEMORY_CHOICES = ("auto", "beside", "inside")
MEMORY_MARGIN_BYTES = 512 * 2**20
"""What staging leaves free: steps, requests and the page cache that it reads through need some."""
CHANGE_TIMEOUT_S = 60.0
"""How long who reads the weights waits for who changes them: longer than a commit of staged weights. Streamed ones are
read from a disk meanwhile, and who waits for too long is told to try again later."""
MAX_READS = 5
"""So often is a reading of the weights begun anew when a commit came between."""

logger = logging.getLogger(__name__)


class ParkableLoop(Protocol):
    """What swaps need of a loop."""

    @property
    def is_running(self) -> bool: ...

    @property
    def is_stopping(self) -> bool: ...

    @property
    def is_generating(self) -> bool: ...

    def acquire_pause(
        self, timeout_s: float | None = None, *, hold: Hold | None = None, patience: Patience | None = None
    ) -> None: ...

    def settle(self, hold: Hold, timeout_s: float | None = None, *, patience: Patience | None = None) -> None: ...

    def release_pause(self, *, hold: Hold | None = None) -> None: ...

    def change_version(self, version: int, *, in_flight: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...


@dataclass(frozen=True, slots=True)
class StagingRequest:
    """The arguments of `stage_weights`."""

    paths: Paths
    cast: bool = False
    partial: bool = False
    memory: str = "auto"
    undo_folder: str | PathLike[str] | None = None


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
        free_bytes: Callable[[], int],
    ) -> None:
        """free_bytes: gives how much memory the weights' device has to spare."""
        self._model = model
        self._ranks = ranks
        self._packed = packed
        self._in_place = in_place
        self._free_bytes = free_bytes
        self._room = Room()
        self._loss: WeightsLost | None = None
        # Of this moment, when no step runs: each takes it over for its length.
        self._attention: str = model.config._attn_implementation
        self._parks: list[ParkedLoop] = []
        self._lock = threading.RLock()
        """Held by whoever exchanges weights, and while the list of parks changes."""
        self._changes = _Changes()
        self._marks: bytes | None = None
        self.version = 1

    def stage(self, request: StagingRequest) -> StagedWeights:
        """As the manager's `stage_weights`."""
        self._check(request)
        with alone():
            staged = self._stage_part(request) if request.partial else self._read(request)
        self.prepare(staged)
        return staged

    def prepare(self, staged: StagedWeights) -> None:
        """Makes what depends on staged weights, beside generation."""
        with alone():
            if self._packed is not None and staged.is_ready and staged.prepared is None:
                staged.prepared = self._packed.prepare(staged.pairs, rest=self._pace().rest)
            if self._in_place and staged.is_ready and not self._has_old(staged):
                self._changes.read(lambda: staged.keep_old(version=self.version))

    def digests(self) -> dict[str, str]:
        """As the manager's `weight_digests`."""
        self._raise_if_no_driver()
        with alone():
            return self._changes.read(
                lambda: (
                    served_digests(self._model) if self._ranks is None else digests_on_ranks(self._model, self._ranks)
                )
            )

    def probe(self, staged: StagedWeights, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """As the manager's `probe_weights`."""
        if self._ranks is not None:
            raise WeightsError("the model is cut over tensor parallel ranks, and a probe runs a whole one")
        if staged.is_streamed:
            raise WeightsError("these weights are not in memory, so nothing can be probed before they are committed")
        if not staged.is_ready:
            raise WeightsError("these weights are committed or discarded; a probe is of staged ones")

        def run() -> list[list[float]]:
            return probe(self._model, staged.pairs, prompts, attention=self._attention)

        with alone():
            return self._changes.read(run) if staged.unchanged else run()

    def park(
        self, *, timeout_s: float | None, in_flight: str, pinned: str, patience: Patience | None = None
    ) -> "ParkedLoop":
        """As the manager's `park`."""
        _check_choice("in_flight", in_flight, IN_FLIGHT_CHOICES)
        _check_choice("pinned", pinned, PINNED_CHOICES)
        self._raise_if_no_driver()
        hold = Hold(is_for_all=in_flight == "finish") if "finish" in (in_flight, pinned) else None
        loop = self.loop
        loop.acquire_pause(timeout_s, hold=hold, patience=patience)
        return self._kept(ParkedLoop(self, loop, hold, in_flight), loop)

    def settle(
        self, *, timeout_s: float | None, in_flight: str, pinned: str, patience: Patience | None = None
    ) -> "ParkedLoop":
        """As the manager's `settle`."""
        _check_choice("in_flight", in_flight, IN_FLIGHT_CHOICES)
        _check_choice("pinned", pinned, PINNED_CHOICES)
        if "finish" not in (in_flight, pinned):
            raise InvalidRequest("neither in_flight nor pinned is 'finish', so nothing is to settle; park", "in_flight")
        self._raise_if_no_driver()
        hold, loop = Hold(is_for_all=in_flight == "finish"), self.loop
        loop.settle(hold, timeout_s, patience=patience)
        return self._kept(ParkedLoop(self, loop, hold, in_flight, is_parked=False), loop)

    def _kept(self, parked: "ParkedLoop", loop: ParkableLoop) -> "ParkedLoop":
        with self._lock:
            self._parks.append(parked)
        if loop.is_stopping:
            # `end_parks` may have come before this one was in the list, and the loop would stand still for good.
            parked.resume()
            raise EngineStopped("the manager stopped before it could pause")
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
        """Starts a version; the caller holds a pause, or the loop does not run."""
        with self._lock:
            version = self.version + 1 if wanted is None else wanted
            self.loop.change_version(version, in_flight=in_flight)
            self.version = version
            if self._marks is not None:
                self.remember()

    def remember(self) -> None:
        """Keeps marks of the weights, for `were_changed`."""
        self._marks = marks_of(self._model)

    def were_changed(self) -> bool:
        """Whether somebody has changed the weights without a word since they were last remembered; cheap."""
        with self._lock:
            return self._marks is not None and self._marks != marks_of(self._model)

    def exchange(self, staged: StagedWeights, version: int | None, in_flight: str) -> object:
        """Commits staged weights under a version, or changes nothing; the caller holds a pause.

        Gives what is to be dropped when nobody waits. Where streamed weights fail and the old ones are lost, the loop
        ends instead of generating with a mix.
        """
        with self._lock, self._changes.mark():
            self._check_version(version)
            if staged.based_on not in (None, self.version):
                raise SwapConflict(
                    f"these weights change a part of version {staged.based_on}, and version {self.version} is served"
                    " now; stage them again"
                )
            try:
                self._commit(staged, version, in_flight)
            except WeightsLost as error:
                self._loss = error
                self.loop.fail(error)
                raise
            return self._refresh_packed(staged)

    def raise_if_lost(self) -> None:
        """Raises EngineDead when a failed exchange has left weights that nothing may be generated with."""
        if self._loss is not None:
            raise EngineDead(str(self._loss)) from self._loss

    def forget(self, parked: "ParkedLoop") -> None:
        """Called by a park that is over."""
        with self._lock:
            self._parks.remove(parked)

    def _stage_part(self, request: StagingRequest) -> StagedWeights:
        def read() -> StagedWeights:
            version = self.version
            staged = self._read(request)
            staged.based_on = version
            return staged

        # What the source leaves out is read in the model.
        return self._changes.read(read)

    def _commit(self, staged: StagedWeights, version: int | None, in_flight: str) -> None:
        if self._in_place and staged.is_ready and not self._has_old(staged):
            staged.keep_old(version=self.version)
        # All or nothing by itself: rolling back what this call did not commit would bring older weights back.
        staged.commit(in_place=self._in_place)
        try:
            self.change_version(version, in_flight=in_flight)
        except BaseException:
            staged.rollback()
            raise

    def _has_old(self, staged: StagedWeights) -> bool:
        """What a commit would overwrite is kept already, or in a log, where the commit itself writes it."""
        return staged.is_streamed or staged.old_version == self.version

    def _refresh_packed(self, staged: StagedWeights) -> object:
        """Gives what to drop later; where memory is short, the old copies go before the new ones are made."""
        if self._packed is None:
            return None
        prepared, staged.prepared = staged.prepared, None
        if staged.is_streamed:
            self._packed.forget()
        try:
            return self._packed.refresh(prepared, all_of_them=self._in_place or staged.is_streamed)
        except (MemoryError, RuntimeError) as error:  # the version has begun, and copies only save time
            logger.warning("weights not packed, so steps take longer until the next swap error=%r", error)
            self._packed.forget()
            return None

    def _pace(self) -> Pace:
        return Pace(lambda: self.loop.is_running and self.loop.is_generating)

    def _read(self, request: StagingRequest) -> StagedWeights:
        paths, cast, partial = request.paths, request.cast, request.partial
        rest = self._pace().rest
        if self._ranks is not None:
            self._raise_if_no_driver()
            return stage_on_ranks(self._model, path_list(paths), self._ranks, cast=cast, partial=partial, rest=rest)
        if not self._has_room_beside(request):
            assert request.undo_folder is not None
            return stage_streamed(
                self._model, paths, cast=cast, partial=partial, undo_folder=fspath(request.undo_folder), rest=rest
            )
        part = read_part(self._model, paths, cast=cast, partial=partial, room=self._room, rest=rest)
        return StagedWeights(part.pairs, part.contents)

    def _has_room_beside(self, request: StagingRequest) -> bool:
        if request.memory != "auto":
            return request.memory == "beside"
        needed = bytes_beside(self._model, request.paths, cast=request.cast, partial=request.partial)
        needed += self._packed.size_bytes if self._packed is not None else 0
        free = self._free_bytes()
        if needed + MEMORY_MARGIN_BYTES <= free:
            return True
        if request.undo_folder is None:
            raise WeightsError(
                f"{needed / 2**20:.0f} MiB for the new weights do not fit the {free / 2**20:.0f} MiB that are free with"
                f" {MEMORY_MARGIN_BYTES / 2**20:.0f} MiB to spare; free memory, or give an undo_folder, and the commit"
                " reads them inside the pause"
            )
        return False

    def _check(self, request: StagingRequest) -> None:
        _check_choice("memory", request.memory, MEMORY_CHOICES)
        if request.memory == "inside" and self._ranks is not None:
            raise WeightsError(
                "the model is cut over tensor parallel ranks, which stage new weights beside the old ones; memory must"
                " be 'auto' or 'beside'"
            )
        if request.memory == "inside" and request.undo_folder is None:
            raise InvalidRequest("memory is 'inside', which needs an undo_folder for the old weights", "undo_folder")
        if request.undo_folder is not None and (request.memory == "beside" or self._ranks is not None):
            raise InvalidRequest(
                "undo_folder is for weights that are exchanged inside the pause, and these are staged beside the old"
                " ones; leave it out",
                "undo_folder",
            )

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

    New requests may be added meanwhile, and wait. Leaving it as a context resumes. One that `settle` has given
    only holds requests back until its `park`.
    """

    def __init__(
        self, weights: LiveWeights, loop: ParkableLoop, hold: Hold | None, in_flight: str, *, is_parked: bool = True
    ) -> None:
        self._weights = weights
        self._loop = loop
        self._hold = hold
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._parked_at = perf_counter() if is_parked else None
        self._paused_s: float | None = None
        self._forgotten: list[object] = []
        self._committed: list[StagedWeights] = []

    @property
    def is_parked(self) -> bool:
        """False once resumed, and before a settled one has parked."""
        return self._parked_at is not None and self._paused_s is None

    def park(self, timeout_s: float | None = None) -> None:
        """Parks a loop that has only settled; raises as the manager's `park`, and then nothing is held."""
        with self._lock:
            if self._paused_s is not None:
                raise EngineStopped("this park is over, and generation goes on; park again")
            if self._parked_at is not None:
                return
            try:
                self._loop.acquire_pause(timeout_s, hold=self._hold)
            except BaseException:
                # What was not reached is not held any more.
                self._paused_s = 0.0
                self._weights.forget(self)
                raise
            self._parked_at = perf_counter()

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
            assert self._parked_at is not None, "weights are exchanged only while the loop is parked"
            self._forgotten.append(self._weights.exchange(staged, version, chosen))
            self._committed.append(staged)

    def resume(self) -> float:
        """Lets generation go on and gives the seconds that it stood still; again is the same as once."""
        with self._lock:
            if self._paused_s is None:
                self._loop.release_pause(hold=self._hold)
                self._paused_s = perf_counter() - self._parked_at if self._parked_at is not None else 0.0
                self._weights.forget(self)
            # Frees what is old while generation goes on.
            self._forgotten.clear()
            for staged in self._committed:
                staged.release_old()
            self._committed.clear()
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
