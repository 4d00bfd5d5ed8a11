"""Tensor parallelism: one driver decides, the other ranks compute the same steps in lockstep.

Every rank holds a slice of the model, cut by transformers' tensor parallel plan, and the keys and values of its own
heads. The driver (rank 0) has the scheduler; what it wants done travels through a key-value store, which a rank can
wait at for as long as the driver is idle. The tensors travel through the collectives inside the model.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum
from time import monotonic, sleep
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though not by name
from transformers import PreTrainedModel

from engine.active_request import ActiveRequest
from engine.block_pool import BlockCopy, CopyKind
from engine.errors import EngineDead
from engine.plan import PlannedRow, StepHandle, StepPlan, StepRunner
from engine.rendezvous import LOOPBACK, NO_TIMEOUT_S, open_store
from engine.request import SamplingParams

T = TypeVar("T")

logger = logging.getLogger(__name__)

POLL = timedelta(seconds=5)
"""How often a waiting rank asks the store anew; it wakes at once when an order comes."""
PAUSE_POLL_S = 0.005
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
KEPT_ORDERS = 8
"""More than a rank can be behind: by the steps in flight, a pause, and one question about weights."""


class Verb(Enum):
    """What a rank is to do next."""

    STEP = "step"
    PARK = "park"
    STOP = "stop"
    WEIGHTS = "weights"


class Deed(StrEnum):
    """What a rank is to do with new weights, and to answer."""

    STAGE = "stage"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    DISCARD = "discard"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class WeightsTask:
    """A question of the driver's about weights. staged: the number of the STAGE that read them."""

    deed: Deed
    number: int
    staged: int
    paths: tuple[str, ...] = ()
    cast: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a task on one rank. source: which files were read. digests: of the parts that lie there. error:
    class, message, tensor of a failure.
    """

    rank: int
    source: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    error: tuple[str, str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """One order of the driver."""

    verb: Verb
    plan: StepPlan = field(default_factory=lambda: StepPlan([]))
    task: WeightsTask | None = None


class RankGroup:
    """The ranks of one model. All of them make it, in the same order, after `torch.distributed` was initialised."""

    def __init__(self, *, timeout_s: float | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = NO_TIMEOUT_S if timeout_s is None else timeout_s
        limit = timedelta(seconds=self.timeout_s)
        self._control = dist.new_group(backend="gloo", timeout=limit)
        hosts: list[str] = [""] * self.size
        dist.all_gather_object(hosts, socket.gethostname(), group=self._control)
        self.num_on_machine = hosts.count(hosts[self.rank])
        # Waiting blocks a connection, so that a rank which waits for orders needs another one to answer over.
        self._orders, self._answers = self._connect(hosts, limit)
        self._sending = threading.Lock()
        self._num_orders = 0
        self._num_asked = 0
        self.num_parks = 0
        """How often all ranks have been parked; the same on each of them."""
        self.asking = threading.Lock()
        """Held by whoever asks, until the answers are there."""

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    def same(self, value: T) -> T:
        """Gives the driver's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def send(self, order: Order) -> None:
        """Tells the other ranks what to do; the driver calls it, from any thread."""
        with self._sending:
            self._orders.set(f"order/{self._num_orders}", encode(order))
            self._orders.delete_key(f"order/{self._num_orders - KEPT_ORDERS}")
            self._num_orders += 1

    def ask(
        self,
        deed: Deed,
        *,
        staged: int | None = None,
        paths: Sequence[str] = (),
        cast: bool = False,
        partial: bool = False,
    ) -> int:
        """Sends a task to the other ranks and gives its number; the driver calls it and holds `asking`."""
        self._num_asked += 1
        number = self._num_asked
        task = WeightsTask(deed, number, number if staged is None else staged, tuple(paths), cast, partial)
        self.send(Order(Verb.WEIGHTS, task=task))
        return task.number

    def answer(self, number: int, answer: Answer) -> None:
        """Tells the driver what became of a task."""
        self._answers.set(f"answer/{number}/{self.rank}", json.dumps([answer.source, answer.digests, answer.error]))

    def answers(self, number: int) -> list[Answer]:
        """Gives the answers of the other ranks to a task; raises EngineDead when one does not come in time."""
        found = []
        for rank in range(1, self.size):
            key = f"answer/{number}/{rank}"
            try:
                self._answers.wait([key], timedelta(seconds=self.timeout_s))
                source, digests, failure = json.loads(self._answers.get(key))
            except RuntimeError as error:
                raise EngineDead(f"rank {rank} gave no answer within {self.timeout_s:.0f} s: {error}") from error
            self._answers.delete_key(key)
            found.append(Answer(rank, source, digests, failure and tuple(failure)))
        return found

    def orders(self) -> Iterator[Order]:
        """Gives the driver's orders, the last of them STOP. Raises EngineDead when the driver is gone."""
        while True:
            order = self._next_order()
            yield order
            if order.verb is Verb.STOP:
                return

    def mark_pause_left(self) -> None:
        """Tells the driver that this rank has left the pause of the last PARK."""
        self._answers.add(f"left/{self.num_parks}", 1)

    def wait_for_pauses_left(self) -> None:
        """Returns when every other rank has left its pause; raises EngineDead when one does not in time."""
        deadline = monotonic() + self.timeout_s
        while self._orders.add(f"left/{self.num_parks}", 0) < self.size - 1:
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
                self._orders.wait([key], POLL)
                order = decode(self._orders.get(key))
            except dist.DistStoreError:
                continue
            except RuntimeError as error:
                raise EngineDead(f"the driver of the tensor parallel group is gone: {error}") from error
            self._num_orders += 1
            return order

    def _connect(self, hosts: list[str], timeout: timedelta) -> tuple[TCPStore, TCPStore]:
        """Two connections to a store of the driver's; on loopback where all ranks share a machine."""
        bind_to, name = (LOOPBACK, LOOPBACK) if self.num_on_machine == self.size else ("", hosts[0])
        listener = socket.create_server((bind_to, 0)) if self.is_driver else None
        port = self.same(listener.getsockname()[1] if listener is not None else 0)
        first = open_store((name, port), listener, num_ranks=self.size, timeout=timeout)
        return first, open_store((name, port), None, num_ranks=self.size, timeout=timeout)


class DriverRunner:
    """The runner of the driver: has every step computed by all ranks."""

    def __init__(self, runner: StepRunner, ranks: RankGroup) -> None:
        self._runner = runner
        self._ranks = ranks
        self._is_joint = False

    def launch(self, plan: StepPlan) -> StepHandle:
        self._ranks.send(Order(Verb.STEP, plan))
        return self._runner.launch(plan)

    def park(self) -> None:
        """Lets the pauses of the other ranks begin."""
        self._ranks.num_parks += 1
        self._ranks.send(Order(Verb.PARK))

    def share_pause(self) -> None:
        """Makes the pause that the caller holds one that all ranks enter; without it they only wait for orders."""
        self._is_joint = True

    def unpark(self) -> None:
        """Waits until the other ranks have left a shared pause, or their weights would be half changed."""
        if self._is_joint:
            self._ranks.wait_for_pauses_left()
        self._is_joint = False

    def close(self) -> None:
        """Ends the loops of the other ranks."""
        self._ranks.send(Order(Verb.STOP))


def disable_graph_mixing(
    device: torch.device,
    environment: MutableMapping[str, str] = os.environ,  # noqa: TID251  # NCCL takes this setting from nowhere else
) -> None:
    """Tells NCCL, on a GPU, that captured and other communication are never mixed, unless the environment says more.

    That is so here, and NCCL then need not guard against it. Communicators that exist already keep what they have, so
    a launcher had better set it.
    """
    if device.type == "cuda" and GRAPH_MIXING not in environment:
        environment[GRAPH_MIXING] = "0"
        logger.info("%s is set to 0; it counts for communicators that are made from here on", GRAPH_MIXING)


def rank_group_of(model: PreTrainedModel, *, timeout_s: float | None) -> RankGroup | None:
    """Gives the ranks that a model is cut over, or None for a whole one."""
    if not dist.is_available() or not dist.is_initialized() or not getattr(model, "tp_size", None):
        return None
    return RankGroup(timeout_s=timeout_s)


def encode(order: Order) -> str:
    """Gives an order as JSON: the store is open to the network, and reading a pickle would run what it says."""
    rows = [
        [
            row.request.request_id,
            row.start,
            row.token_ids,
            row.block_tables,
            row.samples,
            row.scored.start,
            row.scored.stop,
        ]
        for row in order.plan.rows
    ]
    copies = [[[copy.kind.value, copy.source, copy.target] for copy in group] for group in order.plan.copies]
    task = order.task and astuple(order.task)
    return json.dumps([order.verb.value, rows, copies, task])


def decode(text: bytes) -> Order:
    """Gives back what `encode` took; the requests are nameplates, since only the driver samples."""
    verb, rows, copies, task = json.loads(text)
    plan = StepPlan(
        rows=[
            PlannedRow(
                request=ActiveRequest(request_id, [], SamplingParams(), created_time=0.0),
                start=start,
                token_ids=token_ids,
                block_tables=block_tables,
                samples=samples,
                scored=range(first, stop),
            )
            for request_id, start, token_ids, block_tables, samples, first, stop in rows
        ],
        copies=[[BlockCopy(CopyKind(kind), source, target) for kind, source, target in group] for group in copies],
    )
    return Order(Verb(verb), plan, task and _task(*task))


def _task(deed: str, number: int, staged: int, paths: list[str], cast: bool, partial: bool) -> WeightsTask:
    return WeightsTask(Deed(deed), number, staged, tuple(paths), cast, partial)
