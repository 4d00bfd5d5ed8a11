"""Runs a plan through the model: packed forward, logits of the rows that sample, their tokens."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.cpu import find_cpu_kernel
from engine.attention.flash import FlashKernels
from engine.attention.interface import (
    STEP_ARGUMENT,
    StepFunction,
    attention_configs,
    run_attention,
    use_step,
)
from engine.batch import Batch, build_batch
from engine.compilation import CompiledForward, CompileOptions
from engine.config import ResolvedConfig
from engine.errors import EngineDead, InvalidRequest, UnsupportedModel
from engine.fused_decoder import fuse_decoder_layers
from engine.fused_layers import fuse_layers
from engine.graphs import GraphMaker, StepGraphs
from engine.kv_cache import KVCache, LayerShape
from engine.packed_step import StepPacker
from engine.packed_weights import PackedWeights
from engine.plan import PlannedRow, StepHandle, StepPlan
from engine.sampling import DrawnRows, DrawnStep, NewTokens, RowSampler, score_prompts
from engine.stand_ins import StandIn, has_global_hooks, in_use, structure_of

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the cache's tensors. One thread at a time; on a GPU a launch may return before its step has run."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ResolvedConfig,
        layers: Sequence[LayerShape],
        sampler: RowSampler | None = None,
        *,
        packed: PackedWeights | None = None,
        flash: FlashKernels | None = None,
        graphs: GraphMaker | None = None,
        compiling: CompileOptions | None = None,
        is_driver: bool = True,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """packed: what the model's linear layers compute with. flash: attention's kernels on a GPU; None takes others.

        graphs: what captures steps, where the config says so. compiling: how the model is compiled.

        Of several ranks only the driver samples; `all_agree` tells whether a step went well on all of them.
        """
        self._model = model
        self._is_driver = is_driver
        self._all_agree = all_agree
        self._sampler = sampler or RowSampler(model)
        self._config = config
        self._configs = attention_configs(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        # The compiler would have to compile them anew in each step, and fuses by itself.
        self._packed, self._is_compiled = packed, compiling is not None
        self._structure = structure_of(model)
        if packed is not None:
            packed.find_layers(model)
        self._stand_ins = [] if self._is_compiled else stand_ins_for(model, packed)
        self._kernel = find_cpu_kernel(model.dtype, model.device) if flash is None else None
        has_graphs = any(config.use_cuda_graph)
        self._cache = KVCache(
            layers,
            config,
            dtype=model.dtype,
            device=model.device,
            tokens_lead=flash is not None,
            has_scratch=has_graphs,
        )
        self._new_tokens = NewTokens(DrawnRows())
        self._compiled = (
            None
            if compiling is None
            else CompiledForward(self._run_model, compiling, interval=config.q_padding_interval_size)
        )
        self._packer: StepPacker | None = None
        self._graphs: StepGraphs | None = None
        if flash is not None:
            self._packer = StepPacker(self._cache, flash, config.windows, config.max_blocks_per_request)
            if has_graphs and graphs is not None:
                self._graphs = StepGraphs(graphs, self._packer, config, model=model, forward=self._logits)

    def warm_up(self) -> None:
        """Compiles and captures what the first steps would otherwise have to. Not while a step runs."""
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode():
                if self._compiled is not None:
                    with use_step(self._configs):
                        self._compiled.warm_up(self._model.device)
                if self._graphs is not None:
                    self._graphs.warm_up()
        finally:
            self._model.train(was_training)

    def follow_structure(self) -> bool:
        """Takes up modules, hooks and settings that are others now, and says whether any are; `refresh` of the packed
        weights comes after. Only while nothing is in flight.
        """
        structure = structure_of(self._model)
        if structure == self._structure:
            return False
        logger.info("modules of the model were changed, stand-ins are chosen anew")
        self._structure, self._configs = structure, attention_configs(self._model)
        if self._packed is not None:
            self._packed.find_layers(self._model)
        if not self._is_compiled:
            self._stand_ins = self._chosen_anew()
        if self._graphs is not None:
            self._graphs.forget()
        return True

    def _chosen_anew(self) -> list[StandIn]:
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            return stand_ins_for(self._model, self._packed)
        finally:
            for module, mode in modes:
                module.training = mode

    def forget_moved_weights(self) -> None:
        """Drops captured steps where the weights have other addresses now. Only while nothing is in flight."""
        if self._graphs is not None:
            self._graphs.forget_if_moved()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Makes the planned copies and computes a step; its handle has the token of each row that samples.

        A failure belongs to one request: when a batch fails, its rows are run one by one, and a row that fails alone
        gets an entry with an error. Raises EngineDead when the device itself is broken.
        """
        for group, copies in enumerate(plan.copies):
            self._cache.copy(group, copies)
        drawn = self._compute(plan.rows)
        self._new_tokens = NewTokens(drawn)
        return DrawnStep(drawn, self._sampler.stop_strings, self._model.device)

    def park(self) -> None:
        """Nothing is in flight between two steps, so there is nothing to wait for."""

    def unpark(self) -> None:
        """Nor is there anything to set going again."""

    def close(self) -> None:
        """Nothing runs but the caller's thread."""

    def _compute(self, rows: list[PlannedRow]) -> DrawnRows:
        drawn = DrawnRows()
        failure: Exception | None = None
        try:
            drawn = self._forward(rows)
        except torch.AcceleratorError as error:
            raise EngineDead(f"the device failed: {error}") from error
        except Exception as error:  # noqa: BLE001  # told below, to the one request it belongs to
            failure = error
        # Every rank retries, or none: the model's collectives need all of them.
        if self._all_agree(failure is None):
            return drawn
        drawn = DrawnRows()
        if len(rows) == 1:
            request = rows[0].request
            logger.error("request failed alone request_id=%s", request.request_id, exc_info=failure)
            reason = f"{type(failure).__name__}: {failure}" if failure is not None else "another rank failed"
            drawn.fail(request, f"the model failed on this request: {reason}")
            return drawn
        logger.warning("step failed, its rows are run one by one rows=%d error=%r", len(rows), failure)
        for row in rows:
            drawn.extend(self._compute([row]))
        return drawn

    def _forward(self, rows: list[PlannedRow]) -> DrawnRows:
        with torch.inference_mode():
            if self._model.training:  # left so by a training step inside a pause
                self._model.eval()
            if self._kernel is not None:
                self._kernel.use_threads()
            if self._is_driver:
                self._sampler.begin(rows, self._config.vocab_size)
            batch, logits_LV = self._replay(rows) or self._launch(rows)
            if not self._is_driver:
                return DrawnRows()
            num_sampling = len(batch.sampling_rows)
            drawn = self._sampler.draw(batch.sampling_rows, logits_LV[:num_sampling]) if num_sampling else DrawnRows()
            if batch.scored_rows:
                drawn.scored.append(score_prompts(batch.scored_rows, logits_LV[num_sampling:]))
            return drawn

    def _replay(self, rows: list[PlannedRow]) -> tuple[Batch, Tensor] | None:
        return None if self._graphs is None else self._graphs.run(rows, self._new_tokens.fill)

    def _launch(self, rows: list[PlannedRow]) -> tuple[Batch, Tensor]:
        if self._packer is not None:
            batch = self._packer.build(rows, self._model.device)
        else:
            in_place = self._kernel is not None
            batch = build_batch(rows, self._cache, self._config.windows, self._model.device, reads_in_place=in_place)
        self._new_tokens.fill(batch.input_ids_1T, batch.rows)
        return batch, self._logits(batch)

    def _logits(self, batch: Batch) -> Tensor:
        """Gives the logits that are wanted as L x V; of one row, unused, where none are."""
        wanted_L = batch.logit_tokens_L if len(batch.logit_tokens_L) else torch.zeros_like(batch.input_ids_1T[0, :1])
        inputs = batch.input_ids_1T, batch.position_ids_1T, wanted_L, run_attention(batch.step, self._kernel)
        with use_step(self._configs), in_use(self._stand_ins):
            if self._compiled is not None:
                return self._compiled(*inputs, is_decode=batch.is_decode)
            return self._run_model(*inputs)

    def _run_model(self, ids_1T: Tensor, positions_1T: Tensor, wanted_L: Tensor, attention: StepFunction) -> Tensor:
        rows: dict[str, Any] = {"logits_to_keep": wanted_L} if self._takes_rows else {}
        output = self._model(
            input_ids=ids_1T,
            position_ids=positions_1T,
            attention_mask=None,
            use_cache=False,
            **rows,
            **{STEP_ARGUMENT: attention},
        )
        logits_LV: Tensor = output.logits[0]
        return logits_LV if self._takes_rows else logits_LV[wanted_L]


def stand_ins_for(model: PreTrainedModel, packed: PackedWeights | None) -> list[StandIn]:
    """Gives what the modules of a model on a CPU are to compute with; where a whole layer cannot, its parts do."""
    if has_global_hooks():
        return []
    if packed is None:
        return fuse_layers(model)
    return fuse_layers(model, packed) + packed.stand_ins() + fuse_decoder_layers(model, packed)


def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Runs two tokens through the model to learn what each attention layer stores.

    Raises UnsupportedModel for a model that does not call the attention interface once in every layer.
    """
    found: dict[int, LayerShape] = {}
    text_config = model.config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None)

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: dict[str, Any],
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in found:
            raise UnsupportedModel(
                f"{type(module).__name__} has no layer index of its own, so it has no place in the cache"
            )
        if layer_types and "sliding" in layer_types[layer] and rules["sliding_window"] is None:
            raise UnsupportedModel(f"{type(module).__name__} hides its sliding window from the attention interface")
        found[layer] = LayerShape(
            num_kv_heads=key.shape[1],
            key_width=key.shape[3],
            value_width=value.shape[3],
            window=rules["sliding_window"],
            has_sinks=rules["s_aux"] is not None,
        )
        return query.new_zeros(query.shape[2], query.shape[1], value.shape[3])

    ids_1T = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), use_step(attention_configs(model)):
            positions_1T = torch.arange(2, device=model.device)[None]
            model(
                input_ids=ids_1T,
                position_ids=positions_1T,
                use_cache=False,
                **{STEP_ARGUMENT: record},
            )
    except InvalidRequest as error:
        raise UnsupportedModel(
            f"{type(model).__name__} does not pass keywords on to its attention, and the engine reaches it by one"
        ) from error
    except (TypeError, KeyError) as error:
        name = type(model).__name__
        raise UnsupportedModel(
            f"{name} cannot be run on packed tokens through the attention interface: {error}"
        ) from error
    finally:
        model.train(was_training)
    num_layers = text_config.num_hidden_layers
    if len(found) == num_layers and sorted(found) != list(range(num_layers)):
        raise UnsupportedModel(
            f"the layers of {type(model).__name__} have the indices {', '.join(map(str, sorted(found)))}, and they have"
            f" to be 0 to {num_layers - 1}; give each attention its layer_idx anew"
        )
    if len(found) != num_layers:
        raise UnsupportedModel(
            f"{type(model).__name__} sends {len(found)} of its {num_layers} layers through transformers' attention"
            " interface; all of them have to"
        )
    if not layer_types and any(layer.window is None for layer in found.values()):
        _check_no_window(model, text_config)
    return [found[layer] for layer in sorted(found)]


def _check_no_window(model: PreTrainedModel, text_config: Any) -> None:
    """Refuses a window that a layer told nothing of: the cache of plain `generate` follows it even so."""
    longest = getattr(text_config, "max_position_embeddings", None)
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(text_config, name, None)
        if window is not None and (longest is None or window < longest):
            raise UnsupportedModel(
                f"{type(model).__name__} hides {name}={window} of its config from the attention interface"
            )
