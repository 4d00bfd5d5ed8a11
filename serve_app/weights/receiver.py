"""The receiver of a trainer's process group: a Ray actor on the controller's machine, one for each session."""

from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine import InvalidRequest, PitstopError, WeightsSourceError
from serve_app.weights.collective import RECEIVER, Meeting, PairGroup, PieceHeader, check_backend, open_store, unpack
from serve_app.weights.tensor_pieces import TensorPiece

START_TIMEOUT_S = 120.0
"""For Ray to start a process that loads torch: seconds, on a machine that does nothing else."""
ANSWER_S = 10.0
"""For an answer to come, beside the group's own deadline."""


class Receiver:
    """Rank 1 of one group. Its methods block, one at a time."""

    def __init__(self) -> None:
        self._group: PairGroup | None = None

    def check(self, backend: str) -> None:
        """Raises InvalidRequest for a backend that this process has not got; else it has started."""
        check_backend(backend)

    def join(self, meeting: Meeting) -> None:
        """Meets the trainer. Raises WeightsSourceError where that does not come in time."""
        self._group = PairGroup(meeting, open_store(meeting, is_master=False), RECEIVER)

    def receive(self, headers: Sequence[PieceHeader]) -> list[TensorPiece]:
        """Gives the next bucket that the trainer broadcasts."""
        assert self._group is not None
        num_bytes = sum(header.num_bytes for header in headers)
        return unpack(headers, self._group.broadcast(torch.empty(num_bytes, dtype=torch.uint8)))


class ReceiverHandle:
    """A receiver, as the controller has it. Blocks; raises errors of the project only."""

    def __init__(self, backend: str) -> None:
        """Begins to start it beside this process. Raises InvalidRequest for NCCL where this machine has no GPU."""
        self._backend = backend
        self._timeout_s = 0.0
        node_id = ray.get_runtime_context().get_node_id()
        if backend == "nccl" and not _num_gpus(node_id):
            raise InvalidRequest("backend is 'nccl', and the controller's machine has no GPU; use 'gloo'", "backend")
        actor: Any = ray.remote(Receiver)
        self._actor = actor.options(
            num_cpus=0,
            num_gpus=1 if backend == "nccl" else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote()

    def wait(self) -> None:
        """Waits until it has started."""
        self._get(self._actor.check.remote(self._backend), START_TIMEOUT_S)

    def join(self, meeting: Meeting) -> None:
        """Has it meet the trainer."""
        self._timeout_s = meeting.timeout_s
        self._get(self._actor.join.remote(meeting), meeting.timeout_s + ANSWER_S)

    def receive(self, headers: Sequence[PieceHeader]) -> list[TensorPiece]:
        """Gives the next bucket that the trainer broadcasts."""
        pieces: list[TensorPiece] = self._get(self._actor.receive.remote(headers), self._timeout_s + ANSWER_S)
        return pieces

    def end(self) -> None:
        """Ends its process, and with it whatever it waits for."""
        ray.kill(self._actor)

    def _get(self, reference: Any, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            cause: Any = error.cause
            raise (cause if isinstance(cause, PitstopError) else WeightsSourceError(str(error))) from error
        except RayActorError as error:
            raise WeightsSourceError("the receiver of the process group has ended; swap again") from error
        except RayError as error:
            raise WeightsSourceError(f"the receiver of the process group failed ({error}); swap again") from error


def _num_gpus(node_id: str) -> float:
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
    return sum(float(node["Resources"].get("GPU", 0)) for node in nodes if node["NodeID"] == node_id)
