"""Where tensor parallel ranks find each other: a key-value store that rank 0 holds."""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though not by name

from engine.errors import EngineDead

LOOPBACK = "127.0.0.1"
NO_TIMEOUT_S = 365 * 24 * 3600.0
"""What a timeout of None means: gloo wants a number."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One of `size` ranks on this machine. port: of loopback, where rank 0 holds the store."""

    rank: int
    size: int
    port: int


def open_meeting() -> socket.socket:
    """Gives the socket at which rank 0 meets the others, on a free port of loopback; `join_ranks` takes it over."""
    return socket.create_server((LOOPBACK, 0))


def join_ranks(
    place: RankPlace, *, meeting: socket.socket | None = None, device: str = "auto", timeout_s: float | None = None
) -> None:
    """Makes this process a rank of a group on this machine; returns when all have come, before any model is loaded.

    meeting: from `open_meeting`, at rank 0 only. device: as in `load_model`; ranks talk over NCCL on a GPU, else over
    gloo. timeout_s: after which a rank that is waited for counts as gone; None is without limit.
    Raises EngineDead when they do not all come in time.
    """
    is_gpu = torch.cuda.is_available() if device == "auto" else torch.device(device).type == "cuda"
    limit = timedelta(seconds=NO_TIMEOUT_S if timeout_s is None else timeout_s)
    try:
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=open_store((LOOPBACK, place.port), meeting, num_ranks=place.size, timeout=limit),
            rank=place.rank,
            world_size=place.size,
            timeout=limit,
        )
    except RuntimeError as error:
        raise EngineDead(
            f"not all {place.size} tensor parallel ranks met within {limit.total_seconds():.0f} s: {error}"
        ) from error


def open_store(
    address: tuple[str, int], listener: socket.socket | None, *, num_ranks: int, timeout: timedelta
) -> TCPStore:
    """Gives a connection to the store at `address`; with a listener bound to it, this process holds the store."""
    host, port = address
    if listener is None:
        return TCPStore(host, port, num_ranks, is_master=False, timeout=timeout)
    return TCPStore(
        host,
        port,
        num_ranks,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
