"""Swap sessions: a trainer opens one, puts its tensors bucket by bucket, and commits them as an ordinary swap.

What arrives is written to the store at once, so a session holds no tensors in memory and its version can be read again
by whoever comes late. A session belongs to an owner who renews its lease; without it the session is aborted. No Ray.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from copy import copy
from dataclasses import dataclass, field, replace

from engine import InvalidRequest, PitstopError, QueueFull, SwapConflict, WeightsError
from serve_app.messages import SessionRequest, SessionState, SwapRequest, SwapResult, WeightSource
from serve_app.protocol.errors import SwapSessionGone
from serve_app.weights.history import WeightHistory
from serve_app.weights.store import FolderWriter, WeightStore
from serve_app.weights.swap_checks import check_base, check_how, check_lease
from serve_app.weights.tensor_pieces import TensorPiece

logger = logging.getLogger("ray.serve.pitstop")

MAX_OPEN_SESSIONS = 4
"""A fleet has one trainer, or few that take turns; each session holds disk."""
MAX_LAYERS = 8
"""Folders that the weights of a version lie in, the first of them whole or over the configured model."""
KEPT_ENDED, KEPT_ENDED_S = 64, 600.0
"""How many ended sessions are remembered, and how long, so that a call whose answer was lost can be sent again."""

Load = Callable[[], Iterable[TensorPiece]]
"""Gives a bucket; may block."""


@dataclass(slots=True)
class _Session:
    request: SessionRequest
    writer: FolderWriter
    base_version: int | None
    lease_until: float
    next_sequence: int = 0
    folder: str | None = None
    filled: list[str] = field(default_factory=list)
    has_cast_fill: bool = False
    commit: "asyncio.Task[SwapResult] | None" = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> SessionState:
        return SessionState(self.request.session_id, self.next_sequence, self.writer.size_bytes)


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    outcome: SwapResult | PitstopError


class SwapSessions:
    """The open sessions and the last of those that have ended. One event loop only.

    Invariant: a folder of the store that is neither a remembered version's nor an open session's goes with the session
    that wrote it.
    """

    def __init__(
        self,
        store: WeightStore,
        history: WeightHistory,
        swap: Callable[[SwapRequest], Awaitable[SwapResult]],
        *,
        max_bytes: int,
        base_path: Callable[[], str],
        ended: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`swap` brings a folder to the fleet. max_bytes: of all open sessions together.

        base_path: gives the folder of the model that the application was started with. ended: told each session that
        has ended, however it ended.
        """
        self._store = store
        self._history = history
        self._swap = swap
        self._max_bytes = max_bytes
        self._base_path = base_path
        self._on_end = ended
        self._clock = clock
        self._open: dict[str, _Session] = {}
        self._ended: dict[str, _Ended] = {}
        self._opening = asyncio.Lock()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def open(self, request: SessionRequest) -> SessionState:
        """Opens a session, or gives the open one of this id; with the result where its idempotency key has brought one.

        Raises InvalidRequest for a lease out of bounds or what no swap would take, and QueueFull while too many are
        open.
        """
        async with self._opening:
            if (session := self._open.get(request.session_id)) is not None:
                return session.state
            return await self._open_new(request)

    async def put(self, session_id: str, sequence: int, load: Load) -> SessionState:
        """Writes bucket number `sequence`, from 0; one that came already changes nothing.

        Raises InvalidRequest for a number that is not the next, with the session going on. Whatever else fails, as
        weights that differ from what came under their names before or a full disk, ends the session.
        """
        session = self._require(session_id)
        if session.folder is not None or session.commit is not None:
            raise InvalidRequest(f"swap session {session_id} is being committed and takes nothing more", "sequence")
        async with session.lock:
            # It may have ended while the bucket before this one was written.
            self._renew(self._require(session_id))
            if sequence < session.next_sequence:
                return session.state
            if sequence > session.next_sequence:
                raise InvalidRequest(f"bucket {sequence} came where {session.next_sequence} is next", "sequence")
            await self._write(session, load)
            session.next_sequence += 1
            self._renew(session)
            return session.state

    async def commit(self, session_id: str) -> SwapResult:
        """Brings the weights to the fleet, once; asked again, it gives the same answer.

        Raises what a swap raises, and the session has then ended with the old weights serving; after SwapConflict alone
        it stays open, and may be committed again.
        """
        if (ended := self._ended.get(session_id)) is not None:
            if isinstance(ended.outcome, PitstopError):
                raise ended.outcome
            return ended.outcome
        session = self._require(session_id)
        if session.commit is None:
            # In an empty context, as Serve ends what a request has started together with the request.
            session.commit = asyncio.get_running_loop().create_task(self._commit(session), context=Context())
        return await asyncio.shield(session.commit)

    async def abort(self, session_id: str, reason: str = "its owner aborted it") -> None:
        """Ends a session and removes what it wrote. Raises SwapConflict once it is being committed."""
        if session_id in self._ended:
            return
        session = self._require(session_id)
        _refuse_committing(session)
        async with session.lock:
            if session_id in self._ended:
                return
            # Asked for while the last bucket was written.
            _refuse_committing(session)
            await self._end(session, _gone(session_id, reason))

    async def renew(self, session_id: str) -> SessionState:
        """Prolongs the lease. Raises SwapSessionGone where there is nothing to prolong."""
        session = self._require(session_id)
        self._renew(session)
        return session.state

    async def expire(self) -> None:
        """Aborts the sessions whose lease has run out, and forgets those that ended long ago."""
        now = self._clock()
        for session in list(self._open.values()):
            is_busy = session.lock.locked() or session.commit is not None
            if session.lease_until < now and not is_busy:
                await self._expire(session)
        recent = [(name, ended) for name, ended in self._ended.items() if now - ended.at < KEPT_ENDED_S]
        self._ended = dict(recent[-KEPT_ENDED:])

    async def _expire(self, session: _Session) -> None:
        session_id, lease_s = session.request.session_id, session.request.lease_s
        try:
            await self.abort(session_id, f"its owner was not heard of for {lease_s:g} s, the lease it asked for")
        except Exception:
            # The others have to end as well.
            logger.exception("event=session_not_expired session=%s", session_id)

    async def prune(self) -> None:
        """Keeps the store within its bound; does nothing where another controller has taken the history over."""
        try:
            await self._history.check_writable()
            versions = [_folders(version.source) for version in reversed(self._history.listed())]
            # All of them, as one may be sealed while this looks.
            in_use = [session.writer.path for session in self._open.values()]
            await asyncio.to_thread(self._store.prune, versions, in_use=in_use)
        except (WeightsError, OSError) as error:
            logger.warning("event=store_not_pruned error=%r", str(error))

    async def _open_new(self, request: SessionRequest) -> SessionState:
        if (known := self._known(request)) is not None:
            return SessionState(request.session_id, result=known)
        check_lease(request.lease_s)
        check_how(request.swap)
        await self.expire()
        await self.prune()
        if len(self._open) >= MAX_OPEN_SESSIONS:
            raise QueueFull(f"{len(self._open)} swap sessions are open; commit or abort one, or wait for its lease")
        writer = await asyncio.to_thread(self._store.begin)
        base_version = request.swap.base_version
        if request.swap.partial and base_version is None:
            base_version = self._history.newest.version
        session = _Session(request, writer, base_version, self._clock() + request.lease_s)
        self._open[request.session_id] = session
        logger.info("event=session_opened session=%s lease_s=%g", request.session_id, request.lease_s)
        return session.state

    async def _write(self, session: _Session, load: Load) -> None:
        def write() -> None:
            session.writer.append(load())

        try:
            await asyncio.to_thread(write)
            total = sum(other.writer.size_bytes for other in self._open.values())
            if total > self._max_bytes:
                raise WeightsError(
                    f"open swap sessions hold {total} bytes and may hold {self._max_bytes}; raise weights.session_bytes"
                )
        except Exception as error:
            raise await self._failed(session, error) from error

    async def _commit(self, session: _Session) -> SwapResult:
        async with session.lock:
            # It may have ended while this waited.
            self._require(session.request.session_id)
            try:
                # Also here, as only now it is known what a long chain is filled from; the swap looks in its turn.
                check_base(session.base_version, self._history.newest.version)
                if session.folder is None:
                    session.filled = await self._fill_long_chain(session)
                    session.folder = await asyncio.to_thread(session.writer.seal)
                result = await self._swap(_request_of(session, session.folder))
            except SwapConflict:
                session.commit = None
                self._renew(session)
                raise
            except Exception as error:
                raise await self._failed(session, error) from error
            result = replace(result, unchanged=session.filled) if session.filled else result
            await self._end(session, result)
            await self.prune()
            return result

    async def _fill_long_chain(self, session: _Session) -> list[str]:
        """Makes a partial update whole where the layers below it are many, as every replica that starts reads them all.

        Gives the tensors that it took from them: none where the update stays a layer.
        """
        newest = self._history.newest
        source = newest.source
        if not session.request.swap.partial or source is None or len(source.folders) < MAX_LAYERS:
            return []
        base = [await asyncio.to_thread(self._base_path)] if source.on_model else []
        filled = await asyncio.to_thread(session.writer.fill, [*base, *source.folders])
        # Of another dtype than the one it is loaded in, maybe.
        session.has_cast_fill = bool(filled) and newest.cast
        return filled

    async def _failed(self, session: _Session, error: Exception) -> PitstopError:
        """Ends a session with an error, and gives that as one of the project's."""
        known = error if isinstance(error, PitstopError) else WeightsError(f"the weights were not taken: {error!r}")
        await self._end(session, known)
        return known

    async def _end(self, session: _Session, outcome: SwapResult | PitstopError) -> None:
        session_id = session.request.session_id
        self._open.pop(session_id, None)
        # A copy of an error has no traceback, whose frames would keep a bucket in the object store.
        self._ended[session_id] = _Ended(self._clock(), copy(outcome))
        try:
            if session.folder is None or not self._is_remembered(session.folder):
                await asyncio.to_thread(session.writer.drop)
        finally:
            self._on_end(session_id)
        logger.info("event=session_ended session=%s outcome=%s", session_id, type(outcome).__name__)

    def _is_remembered(self, folder: str) -> bool:
        return any(folder in _folders(version.source) for version in self._history.listed())

    def _known(self, request: SessionRequest) -> SwapResult | None:
        """Gives what an earlier session with this idempotency key has brought; raises SwapConflict for another's."""
        known = self._history.find_key(request.swap.idempotency_key)
        if known is None:
            return None
        if (
            known.source is None
            or known.result is None
            or not any(self._store.holds(folder) for folder in known.source.folders)
        ):
            raise SwapConflict(
                f"idempotency_key {known.idempotency_key!r} brought version {known.version}; use another"
            )
        return known.result

    def _require(self, session_id: str) -> _Session:
        session = self._open.get(session_id)
        if session is not None:
            return session
        ended = self._ended.get(session_id)
        if ended is None:
            raise _gone(session_id, "it is not known here; the controller may have been restarted")
        if isinstance(ended.outcome, SwapResult):
            raise _gone(session_id, f"it brought version {ended.outcome.version}")
        if isinstance(ended.outcome, SwapSessionGone):
            raise ended.outcome
        raise _gone(session_id, str(ended.outcome)) from ended.outcome

    def _renew(self, session: _Session) -> None:
        session.lease_until = self._clock() + session.request.lease_s


def _request_of(session: _Session, folder: str) -> SwapRequest:
    """Gives the swap of a folder; one that was filled holds everything."""
    swap = session.request.swap
    return replace(
        swap,
        source=WeightSource(folder),
        partial=swap.partial and not session.filled,
        cast=swap.cast or session.has_cast_fill,
        base_version=session.base_version,
    )


def _refuse_committing(session: _Session) -> None:
    if session.commit is not None:
        raise SwapConflict(
            f"swap session {session.request.session_id} is being committed; roll the version back instead"
        )


def _gone(session_id: str, reason: str) -> SwapSessionGone:
    return SwapSessionGone(f"swap session {session_id} has ended: {reason}; open another and send all of it again")


def _folders(source: WeightSource | None) -> list[str]:
    return list(source.folders) if source is not None else []
