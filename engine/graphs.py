"""Captured forward passes: a step is padded to a shape that was seen before and replayed over the same tensors.

A graph holds addresses, of the weights too: they may change in value and not in place. What fills a step up to its
shape reads and writes the scratch block of the cache and does not show in the logits.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.config import ResolvedConfig
from engine.packed_step import StepPacker, StepShape, in_order
from engine.plan import PlannedRow
from engine.transfer import to_device

MAX_GRAPH_TOKENS = 1024
"""A mixed step of more tokens computes for longer than the host takes to launch it, and there are too many sizes."""

logger = logging.getLogger(__name__)


class Captured(Protocol):
    """One captured pass; `output` holds the result of the last replay."""

    @property
    def output(self) -> Tensor: ...

    def replay(self) -> None: ...


class GraphMaker(Protocol):
    """What captures work for a device."""

    def capture(self, work: Callable[[], Tensor]) -> Captured: ...


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    output: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """Captures on a stream of its own; all graphs share one pool, since no two run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Runs the work once, for what libraries set up at their first call, and captures it."""
        # Streams are of the present device, which need not be the model's.
        with torch.cuda.device(self._device):
            usual = torch.cuda.current_stream()
            self._stream.wait_stream(usual)
            with torch.cuda.stream(self._stream):
                work()
            usual.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Another thread may be reading new weights, which allocates; only what this thread does is captured.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = work()
        return _CudaGraph(output, graph)


@dataclass(frozen=True, slots=True)
class _Replayable:
    values: Tensor
    captured: Captured


class StepGraphs:
    """The graphs of one runner, by shape. One thread at a time.

    forward: from a batch to the logits of its sampling rows.
    """

    def __init__(
        self,
        maker: GraphMaker,
        packer: StepPacker,
        config: ResolvedConfig,
        *,
        model: nn.Module,
        forward: Callable[[Batch], Tensor],
    ) -> None:
        self._maker = maker
        self._packer = packer
        self._config = config
        self._model = model
        self._forward = forward
        self._graphs: dict[StepShape, _Replayable] = {}
        self._addresses = _addresses(model)
        self._uses_packed, self._uses_decode = config.use_cuda_graph

    def run(
        self, planned: Sequence[PlannedRow], fill: Callable[[Tensor, Sequence[PlannedRow]], None]
    ) -> tuple[Batch, Tensor] | None:
        """Gives the step and its logits, one row of them for each row that samples; None where no graph is to be used.

        The logits are valid until the next step. The first step of a shape computes as usual and is captured then.
        fill: writes to the input ids, for these rows, what only the device knows of them.
        """
        rows = in_order(planned)
        shape = self._padded_shape(rows)
        if shape is None:
            return None
        values = to_device(self._packer.pack(rows, shape), self._packer.cache.device)
        graph = self._graphs.get(shape)
        if graph is None:
            batch = self._packer.unpack(values, shape, rows)
            fill(batch.input_ids_1T, rows)
            logits_LV = self._forward(batch)
            self._capture(shape, values)
        else:
            graph.values.copy_(values)
            batch = self._packer.unpack(graph.values, shape, rows)
            fill(batch.input_ids_1T, rows)
            graph.captured.replay()
            logits_LV = graph.captured.output
        return batch, logits_LV[: len(batch.sampling_rows)]

    def warm_up(self) -> None:
        """Captures the largest mixed step, so that all others fit the pool, and decode steps of doubling size."""
        for shape in self._shapes_to_warm():
            if shape not in self._graphs:
                values = to_device(self._packer.pack([], shape), self._packer.cache.device)
                self._forward(self._packer.unpack(values, shape, []))
                self._capture(shape, values)

    def forget_if_moved(self) -> None:
        """Drops all graphs when a weight has another address than they hold."""
        addresses = _addresses(self._model)
        if addresses != self._addresses:
            logger.warning("weights moved in memory, CUDA graphs are captured anew num_graphs=%d", len(self._graphs))
            self._graphs.clear()
            self._addresses = addresses

    def forget(self) -> None:
        """Drops all graphs: what they captured is not what the model computes any more."""
        self._graphs.clear()

    def _capture(self, shape: StepShape, values: Tensor) -> None:
        """Turns graphs off when the model cannot be captured: it waits for the device, say, to look at a number."""

        def work() -> Tensor:
            return self._forward(self._packer.unpack(values, shape, []))

        try:
            self._graphs[shape] = _Replayable(values, self._maker.capture(work))
        except Exception as error:  # noqa: BLE001  # whatever CUDA or the model says; the step itself has gone well
            self._uses_packed = self._uses_decode = False
            self._graphs.clear()
            logger.warning("model cannot be captured, steps run without CUDA graphs error=%r", error)

    def _padded_shape(self, rows: Sequence[PlannedRow]) -> StepShape | None:
        if any(row.scored for row in rows):
            return None
        exact = self._packer.shape_of(rows)
        if exact.num_packed == 0:
            return self._decode_shape(len(rows)) if self._uses_decode else None
        if self._uses_packed and exact.num_tokens <= MAX_GRAPH_TOKENS:
            return self._packed_shape(exact.num_tokens, len(rows), max(exact.max_ks))
        return None

    def _decode_shape(self, num_rows: int) -> StepShape:
        config = self._config
        padded = min(_round_up(num_rows, config.q_padding_interval_size), config.max_requests_per_batch)
        widths = tuple(
            config.max_blocks_per_request
            if window is None
            else min(config.max_blocks_per_request, self._num_blocks(window))
            for window in config.windows
        )
        return StepShape(padded, padded, padded, 0, 0, widths, (0,) * len(widths))

    def _packed_shape(self, num_tokens: int, num_rows: int, max_k: int) -> StepShape:
        config = self._config
        padded = _round_up(num_tokens, config.q_padding_interval_size)
        # One more row for the padding; powers of two, because each is a graph of its own.
        padded_rows = 1 << num_rows.bit_length()
        longest = _round_up(max_k, config.kv_padding_interval_size)
        max_ks = tuple(
            min(longest, self._num_blocks(seen) * config.page_size)
            for seen in (config.max_model_len if window is None else window + padded for window in config.windows)
        )
        widths = tuple(-(-max_k // config.page_size) for max_k in max_ks)
        return StepShape(padded, padded_rows, 0, padded_rows, padded, widths, max_ks)

    def _num_blocks(self, num_keys: int) -> int:
        """Blocks that so many keys can lie in, wherever in a block they begin."""
        return -(-num_keys // self._config.page_size) + 1

    def _shapes_to_warm(self) -> Iterator[StepShape]:
        config = self._config
        if self._uses_packed:
            most_tokens = min(config.max_batch_tokens, MAX_GRAPH_TOKENS)
            most_rows = min(config.max_requests_per_batch, most_tokens)
            yield self._packed_shape(most_tokens, most_rows, config.max_model_len)
        num_rows = 1
        while self._uses_decode:
            yield self._decode_shape(num_rows)
            if num_rows >= config.max_requests_per_batch:
                return
            num_rows = min(2 * num_rows, config.max_requests_per_batch)


def _round_up(number: int, interval: int) -> int:
    return -(-number // interval) * interval


def _addresses(model: nn.Module) -> tuple[int, ...]:
    tensors = [*model.parameters(), *model.buffers()]
    return tuple(tensor.data_ptr() for tensor in tensors)
