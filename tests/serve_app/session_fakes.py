"""The sessions of a controller over a real store and a history in memory, without a fleet behind them."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from engine import PitstopError
from serve_app.messages import CommittedVersion, SessionRequest, SwapRequest, SwapResult, WeightSource
from serve_app.weights.history import WeightHistory
from serve_app.weights.store import WeightStore
from serve_app.weights.swap_checks import check_base
from serve_app.weights.swap_sessions import SwapSessions
from serve_app.weights.tensor_pieces import TensorPiece, cut_buckets

LEASE_S = 10.0


class Fleet:
    """Commits what sessions bring to a history in memory, at a time the test can stop."""

    def __init__(self, folder: Path, *, max_bytes: int = 2**30, history_bytes: int = 2**30) -> None:
        self.now = 0.0
        self.error: PitstopError | None = None
        self.swapping, self.may_swap = asyncio.Event(), asyncio.Event()
        self.may_swap.set()
        self.asked: list[SwapRequest] = []
        self.base = ""
        self.on_end: Callable[[str], None] = lambda _: None
        self.history = WeightHistory(application="pitstop", model="base", folder=None, num_earlier=16)
        self.store = WeightStore(folder / "store", history_bytes=history_bytes)
        self.sessions = SwapSessions(
            self.store,
            self.history,
            self.swap,
            max_bytes=max_bytes,
            base_path=lambda: self.base,
            ended=lambda one: self.on_end(one),
            clock=lambda: self.now,
        )

    async def swap(self, request: SwapRequest) -> SwapResult:
        self.asked.append(request)
        self.swapping.set()
        await self.may_swap.wait()
        if self.error is not None:
            raise self.error
        check_base(request.base_version, self.history.newest.version)
        version = self.history.next_version
        result = SwapResult(version, version - 1, ["a", "b"], 0.1, 0.01, 0.2)
        committed = CommittedVersion(
            version,
            self._whole(request),
            request.cast or (request.partial and self.history.newest.cast),
            request.label,
            idempotency_key=request.idempotency_key,
            result=result,
        )
        await self.history.commit(committed)
        return result

    def _whole(self, request: SwapRequest) -> WeightSource:
        if not request.partial:
            return request.source
        below = self.history.newest.source or WeightSource(on_model=True)
        return WeightSource(layers=(*below.folders, *request.source.folders), on_model=below.on_model)

    async def open(self, session_id: str = "one", **options: Any) -> None:
        await self.sessions.open(request(session_id, **options))

    async def put(self, sequence: int, session_id: str = "one", **tensors: Tensor) -> int:
        return (await self.sessions.put(session_id, sequence, bucket(**tensors))).next_sequence

    @property
    def num_swaps(self) -> int:
        return len(self.asked)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.store.folder.iterdir())

    def newest(self) -> dict[str, Tensor]:
        """The weights that are served, from their folders."""
        source = self.history.newest.source
        assert source is not None
        folders = [*([self.base] if source.on_model else []), *source.folders]
        layers = [load_file(Path(folder) / "model.safetensors") for folder in folders]
        return {name: tensor for layer in layers for name, tensor in layer.items()}


def request(
    session_id: str = "one", *, lease_s: float = LEASE_S, key: str | None = None, **options: Any
) -> SessionRequest:
    swap = SwapRequest(WeightSource(), idempotency_key=key, **{"label": "step 7", **options})
    return SessionRequest(session_id, swap, lease_s=lease_s)


def bucket(**tensors: Tensor) -> Callable[[], Iterable[TensorPiece]]:
    return lambda: [piece for pieces in cut_buckets(tensors, bucket_bytes=2**20) for piece in pieces]
