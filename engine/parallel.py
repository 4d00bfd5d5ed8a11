"""Tensor parallelism: one driver decides, the other ranks compute the same steps in lockstep.

Every rank holds a slice of the model, cut by transformers' tensor parallel plan, and the keys and values of its own
heads. The driver (rank 0) has the scheduler; what it wants done travels through a key-value store, which a rank can
wait at for as long as the driver is idle. The tensors travel through the collectives inside the model.
"""

import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from time import monotonic, sleep
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though not by name
from transformers import PreTrainedModel

from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy, CopyKind
from engine.errors import EngineDead
from engine.plan import PlannedRow, StepHandle, StepPlan
from engine.request import SamplingParams

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL = timedelta(seconds=5)
"""How often a waiting rank asks the store anew; it wakes at once when an order comes."""
PAUSE_POLL_S = 0.005
NO_TIMEOUT_S = 365 * 24 * 3600.0
"""What `cpu_group_timeout=None` means: gloo wants a number."""


class Verb(Enum):
    """What a rank is to do next."""

    STEP = "step"
    PARK = "park"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Order:
    """One order of the driver."""

    verb: Verb
    plan: StepPlan = field(default_factory=lambda: StepPlan([]))


class StepRunner(Protocol):
    """What computes a step on one rank."""

    def launch(self, plan: StepPlan) -> StepHandle: ...


class RankGroup:
    """The ranks of one model. All of them make it, in the same order, after `torch.distributed` was initialised."""

    def __init__(self, *, timeout_s: float | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = NO_TIMEOUT_S if timeout_s is None else timeout_s
        limit = timedelta(seconds=self.timeout_s)
        self._control = dist.new_group(backend="gloo", timeout=limit)
        self._store = _make_store(self._control, rank=self.rank, size=self.size, timeout=limit)
        self._num_orders = 0

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    def same(self, value: T) -> T:
        """Gives the driver's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def send(self, order: Order) -> None:
        """Tells the other ranks what to do; the driver calls it."""
        self._store.set(f"order/{self._num_orders}", encode(order))
        # All ranks have taken an order before the one after it can have been finished.
        self._store.delete_key(f"order/{self._num_orders - 2}")
        self._num_orders += 1

    def orders(self) -> Iterator[Order]:
        """Gives the driver's orders, the last of them STOP. Raises EngineDead when the driver is gone."""
        while True:
            order = self._next_order()
            yield order
            if order.verb is Verb.STOP:
                return

    def mark_pause_left(self, number: int) -> None:
        """Tells the driver that this rank has left the pause of the `number`-th PARK."""
        self._store.add(f"left/{number}", 1)

    def wait_for_pauses_left(self, number: int) -> None:
        """Returns when every other rank has left its pause; raises EngineDead when one does not in time."""
        deadline = monotonic() + self.timeout_s
        while self._store.add(f"left/{number}", 0) < self.size - 1:
            if monotonic() > deadline:
                raise EngineDead(
                    f"not every rank left the pause within {self.timeout_s:.0f} s; all ranks have to enter it"
                )
            sleep(PAUSE_POLL_S)

    def all_agree(self, is_well: bool) -> bool:
        """Gives True on every rank when all are well; raises EngineDead when one does not answer in time."""
        flag = torch.tensor([int(is_well)])
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._control)
        except RuntimeError as error:
            raise EngineDead(f"a rank of the tensor parallel group is gone: {error}") from error
        return bool(flag.item())

    def _next_order(self) -> Order:
        key = f"order/{self._num_orders}"
        while True:
            try:
                self._store.wait([key], POLL)
                order = decode(self._store.get(key))
            except dist.DistStoreError:
                continue
            except RuntimeError as error:
                raise EngineDead(f"the driver of the tensor parallel group is gone: {error}") from error
            self._num_orders += 1
            return order


class DriverRunner:
    """The runner of the driver: has every step computed by all ranks."""

    def __init__(self, runner: StepRunner, ranks: RankGroup) -> None:
        self._runner = runner
        self._ranks = ranks
        self._num_pauses = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        self._ranks.send(Order(Verb.STEP, plan))
        return self._runner.launch(plan)

    def park(self) -> None:
        """Lets the pauses of the other ranks begin."""
        self._ranks.send(Order(Verb.PARK))

    def unpark(self) -> None:
        """Waits until the other ranks have left theirs, or their weights would be half changed."""
        self._ranks.wait_for_pauses_left(self._num_pauses)
        self._num_pauses += 1

    def close(self) -> None:
        """Ends the loops of the other ranks."""
        self._ranks.send(Order(Verb.STOP))


def rank_group_of(model: PreTrainedModel, *, timeout_s: float | None) -> RankGroup | None:
    """Gives the ranks that a model is cut over, or None for a whole one."""
    if not dist.is_available() or not dist.is_initialized() or not getattr(model, "tp_size", None):
        return None
    return RankGroup(timeout_s=timeout_s)


def _make_store(group: dist.ProcessGroup, *, rank: int, size: int, timeout: timedelta) -> TCPStore:
    """A store of the driver's, on a free port that it tells the others; on loopback where all ranks share a machine."""
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    bind_to, name = ("127.0.0.1", "127.0.0.1") if len(set(hosts)) == 1 else ("", hosts[0])
    port = [0]
    if rank == 0:
        listener = socket.create_server((bind_to, 0))
        port[0] = listener.getsockname()[1]
    dist.broadcast_object_list(port, src=0, group=group)
    if rank != 0:
        return TCPStore(name, port[0], size, is_master=False, timeout=timeout)
    return TCPStore(
        name,
        port[0],
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def encode(order: Order) -> str:
    """Gives an order as JSON: the store is open to the network, and reading a pickle would run what it says."""
    rows = [
        [row.request.request_id, row.start, row.token_ids, row.block_tables, row.samples] for row in order.plan.rows
    ]
    copies = [[[copy.kind.value, copy.source, copy.target] for copy in group] for group in order.plan.copies]
    return json.dumps([order.verb.value, rows, copies])


def decode(text: bytes) -> Order:
    """Gives back what `encode` took; the requests are nameplates, since only the driver samples."""
    verb, rows, copies = json.loads(text)
    plan = StepPlan(
        rows=[
            PlannedRow(
                request=ActiveRequest(request_id, [], SamplingParams(), created_time=0.0),
                start=start,
                token_ids=token_ids,
                block_tables=block_tables,
                samples=samples,
            )
            for request_id, start, token_ids, block_tables, samples in rows
        ],
        copies=[[BlockCopy(CopyKind(kind), source, target) for kind, source, target in group] for group in copies],
    )
    return Order(Verb(verb), plan)
