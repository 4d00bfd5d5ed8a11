"""Runs a plan through the model: packed forward, logits of the rows that sample, their tokens."""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.cpu import find_decode_kernel
from engine.attention.flash import FlashKernels
from engine.attention.interface import (
    STEP_ARGUMENT,
    attention_configs,
    run_attention,
    use_step,
)
from engine.batch import Batch, build_batch
from engine.config import ResolvedConfig
from engine.errors import EngineDead, UnsupportedModel
from engine.kv_cache import KVCache, LayerShape
from engine.packed_weights import PackedWeights
from engine.packed_step import StepPacker
from engine.plan import PlannedRow, SampledToken, StepPlan
from engine.sampling import RowSampler

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the cache's tensors. One thread at a time; nothing is in flight between two calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ResolvedConfig,
        layers: Sequence[LayerShape],
        sampler: RowSampler | None = None,
        *,
        packed: PackedWeights | None = None,
        flash: FlashKernels | None = None,
        is_driver: bool = True,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """packed: what the model's linear layers compute with. flash: attention's kernels on a GPU; None takes others.

        Of several ranks only the driver samples; `all_agree` tells whether a step went well on all of them.
        """
        self._model = model
        self._is_driver = is_driver
        self._all_agree = all_agree
        self._sampler = sampler or RowSampler(model)
        self._config = config
        self._configs = attention_configs(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers_in_use = packed.in_use if packed is not None else nullcontext
        self._kernel = find_decode_kernel(model.dtype, model.device) if flash is None else None
        self._cache = KVCache(layers, config, dtype=model.dtype, device=model.device, tokens_lead=flash is not None)
        self._packer = (
            None if flash is None else StepPacker(self._cache, flash, config.windows, config.max_blocks_per_request)
        )

    def run(self, plan: StepPlan) -> dict[str, SampledToken]:
        """Makes the planned copies, computes a step and gives, by request id, the token of each row that samples.

        A failure belongs to one request: when a batch fails, its rows are run one by one, and a row that fails alone
        gets an entry with an error. Raises EngineDead when the device itself is broken.
        """
        for group, copies in enumerate(plan.copies):
            self._cache.copy(group, copies)
        return self._compute(plan.rows)

    def park(self) -> None:
        """Nothing is in flight between two steps, so there is nothing to wait for."""

    def unpark(self) -> None:
        """Nor is there anything to set going again."""

    def close(self) -> None:
        """Nothing runs but the caller's thread."""

    def _compute(self, rows: list[PlannedRow]) -> dict[str, SampledToken]:
        samples: dict[str, SampledToken] = {}
        failure: Exception | None = None
        try:
            samples = self._forward(rows)
        except torch.AcceleratorError as error:
            raise EngineDead(f"the device failed: {error}") from error
        except Exception as error:  # noqa: BLE001  # told below, to the one request it belongs to
            failure = error
        # Every rank retries, or none: the model's collectives need all of them.
        if self._all_agree(failure is None):
            return samples
        if len(rows) == 1:
            request_id = rows[0].request.request_id
            logger.error("request failed alone request_id=%s", request_id, exc_info=failure)
            reason = f"{type(failure).__name__}: {failure}" if failure is not None else "another rank failed"
            return {request_id: SampledToken(token=0, error=f"the model failed on this request: {reason}")}
        logger.warning("step failed, its rows are run one by one rows=%d error=%r", len(rows), failure)
        for row in rows:
            samples |= self._compute([row])
        return samples

    def _forward(self, rows: list[PlannedRow]) -> dict[str, SampledToken]:
        with torch.inference_mode():
            batch = self._batch(rows)
            if self._model.training:  # left so by a training step inside a pause
                self._model.eval()
            logits_LV = self._logits(batch)
            if not self._is_driver or not batch.sampling_rows:
                return {}
            return self._sampler.sample(batch.sampling_rows, logits_LV)

    def _batch(self, rows: list[PlannedRow]) -> Batch:
        if self._packer is not None:
            return self._packer.build(rows, self._model.device)
        in_place = self._kernel is not None
        return build_batch(rows, self._cache, self._config.windows, self._model.device, reads_in_place=in_place)

    def _logits(self, batch: Batch) -> Tensor:
        """Gives the logits of the sampling rows as L x V; of one row, unused, where none samples."""
        wanted_L = batch.last_tokens_L if batch.sampling_rows else torch.zeros_like(batch.input_ids_1T[0, :1])
        rows: dict[str, Any] = {"logits_to_keep": wanted_L} if self._takes_rows else {}
        with use_step(self._configs), self._layers_in_use():
            output = self._model(
                input_ids=batch.input_ids_1T,
                position_ids=batch.position_ids_1T,
                attention_mask=None,
                use_cache=False,
                **rows,
                **{STEP_ARGUMENT: run_attention(batch.step, self._kernel)},
            )
        logits_LV: Tensor = output.logits[0]
        return logits_LV if self._takes_rows else logits_LV[wanted_L]


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
            num_query_groups=query.shape[1] // key.shape[1],
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
    except (TypeError, KeyError) as error:
        name = type(model).__name__
        raise UnsupportedModel(
            f"{name} cannot be run on packed tokens through the attention interface: {error}"
        ) from error
    finally:
        model.train(was_training)
    if sorted(found) != list(range(text_config.num_hidden_layers)):
        raise UnsupportedModel(
            f"{type(model).__name__} sends {len(found)} of its {text_config.num_hidden_layers} layers through"
            " transformers' attention interface; all of them have to"
        )
    return [found[layer] for layer in sorted(found)]
