"""Loads a decoder, says what it can do, and refuses what the engine cannot serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from engine.errors import UnsupportedModel, WeightsInvalid, WeightsSourceError

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_NUM_NAMES_SHOWN = 3
_KEY_PROJECTIONS = frozenset({"k_proj", "qkv_proj", "query_key_value"})
"""The modules whose output holds the keys, in transformers' tensor parallel plans."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine has to know of a model before it runs it.

    vocab_size: ids 0 to vocab_size - 1 can be read and generated.
    max_model_len: positions that can be served exactly; None when the config names no limit.
    has_learned_positions: beyond `max_model_len` there is no embedding, so that no setting may exceed it.
    is_cut_short: the model was made for more positions, but beyond these its rotary embedding turns every token of a
        step by the length of the longest request in it.
    """

    vocab_size: int
    max_model_len: int | None
    has_learned_positions: bool
    is_cut_short: bool
    num_layers: int
    dtype: torch.dtype
    device: torch.device


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    tensor_parallel_size: int = 1,
) -> PreTrainedModel:
    """Gives the decoder in a local folder or behind a hub id, in eval mode and without gradients.

    dtype: a name as in torch, such as "bfloat16"; "auto" is float32 on a CPU, else what the checkpoint holds.
    device: "auto" is the first GPU where there is one, else the CPU.
    tensor_parallel_size: ranks that the model is cut over by transformers' plan; each of them calls this, after
    `join_ranks` or in a process that torchrun started, and gets its part.
    Raises UnsupportedModel (before any weight is read, where the config tells), WeightsSourceError when the folder is
    missing or cannot be read, WeightsInvalid when the checkpoint lacks a parameter.
    """
    target = torch.device(_default_device() if device == "auto" else device)
    loaded_dtype = parse_dtype(dtype, target)
    config = load_config(path, trust_remote_code)
    _refuse(config.architectures, _objection_to_config(config))
    if tensor_parallel_size > 1:
        _refuse(config.architectures, _objection_to_cutting(config, tensor_parallel_size))
        _check_ranks(tensor_parallel_size, target)
    model, report = _read_model(path, config, loaded_dtype, trust_remote_code, tensor_parallel_size)
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:_NUM_NAMES_SHOWN])
        raise WeightsInvalid(f"{path} lacks {len(missing)} parameters of the model: {shown}", tensor=missing[0])
    check_supported(model)
    if tensor_parallel_size == 1:
        nn.Module.to(model, target)
    nn.Module.eval(model.requires_grad_(False))
    return model


def check_model(path: str, *, trust_remote_code: bool = False, tensor_parallel_size: int = 1) -> None:
    """Raises UnsupportedModel and WeightsSourceError as `load_model` does, as far as the config tells."""
    config = load_config(path, trust_remote_code)
    _refuse(config.architectures, _objection_to_config(config))
    if tensor_parallel_size > 1:
        _refuse(config.architectures, _objection_to_cutting(config, tensor_parallel_size))
    _check_known(config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    _refuse([type(model).__name__], _objection_to_config(model.config) or _objection_to_modules(model))


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel, in one sentence, when the engine would give wrong tokens for this model or none."""
    objection = _objection_to_config(model.config) or _objection_to_modules(model) or _objection_to_placement(model)
    _refuse([type(model).__name__], objection)


def describe(model: PreTrainedModel) -> ModelShape:
    """Gives the shape of a supported model."""
    config = model.config.get_text_config(decoder=True)
    embeddings = model.get_input_embeddings()
    max_positions = getattr(config, "max_position_embeddings", None)
    exact_len = _exact_len(config)
    is_cut_short = exact_len is not None and (max_positions is None or exact_len < max_positions)
    num_embeddings: int = embeddings.get_parameter("weight").shape[0]
    return ModelShape(
        vocab_size=min(config.vocab_size, num_embeddings),
        max_model_len=exact_len if is_cut_short else max_positions,
        has_learned_positions=max_positions is not None and _has_learned_positions(model, embeddings, max_positions),
        is_cut_short=is_cut_short,
        num_layers=config.num_hidden_layers,
        dtype=model.dtype,
        device=model.device,
    )


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Gives what transformers takes for a dtype: one of torch, or "auto" for what the checkpoint holds."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}; it must be auto or a float type of torch such as float32 or bfloat16")
    return dtype


def load_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    """Gives the config in a local folder or behind a hub id. Raises WeightsSourceError."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise WeightsSourceError(f"there is no folder {path}; give a folder with config.json or a hub id")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise WeightsSourceError(f"no model can be read from {path}: {_first_line(error)}") from error
    return config


def _check_known(config: PreTrainedConfig) -> None:
    is_known = type(config) in AutoModelForCausalLM._model_mapping
    if not is_known and "AutoModelForCausalLM" not in getattr(config, "auto_map", {}):
        _refuse(config.architectures, f"transformers has no causal language model for type {config.model_type!r}")


def _check_ranks(size: int, device: torch.device) -> None:
    present = dist.get_world_size() if dist.is_initialized() else 1
    if present != size:
        raise ValueError(
            f"tensor_parallel_size is {size}, and this process is one of {present} ranks; start as many as wanted"
        )
    if device.type != _default_device() or device.index is not None:
        raise ValueError(
            f"device is {str(device)!r}; tensor parallel ranks take the GPU of their LOCAL_RANK where there is one,"
            " else the CPU, so leave it at auto"
        )


def _read_model(
    path: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    num_ranks: int,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    _check_known(config)
    cut: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=num_ranks)} if num_ranks > 1 else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **cut
        )
    except Exception as error:  # Whatever a broken file makes of the reader's many layers.
        raise WeightsSourceError(f"the weights in {path} cannot be read: {_first_line(error)}") from error
    model, report = loaded
    return model, report


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _refuse(names: list[str] | None, objection: str | None) -> None:
    if objection:
        raise UnsupportedModel(f"{' '.join(names or ['this model'])} cannot be served: {objection}")


def _objection_to_config(config: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders are served"
    text_config = config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES)
    if foreign:
        return f"it has layers of type {', '.join(foreign)}, and only full and sliding-window attention are served"
    if getattr(text_config, "num_kv_shared_layers", 0):
        return "some of its layers take their keys and values from other layers, and each must have its own"
    return None


def _objection_to_cutting(config: PreTrainedConfig, num_ranks: int) -> str | None:
    text_config = config.get_text_config(decoder=True)
    plan: dict[str, str] = text_config.base_model_tp_plan or {}
    if getattr(config, "quantization_config", None):
        return "it is quantized, and only unquantized weights are cut over tensor parallel ranks"
    if not plan:
        return f"transformers has no tensor parallel plan for it, so it cannot be cut over {num_ranks} ranks"
    cuts_keys = any(name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and style == "colwise" for name, style in plan.items())
    num_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    if cuts_keys and num_heads % num_ranks:
        return (
            f"its {num_heads} key-value heads do not divide evenly among {num_ranks} tensor parallel ranks; choose a"
            f" tensor_parallel_size that divides {num_heads}"
        )
    return None


def _objection_to_modules(model: Any) -> str | None:
    """`model` is a PreTrainedModel, of whose methods transformers leaves these without types."""
    if model._is_stateful:
        return "it keeps a recurrent state, and only attention over keys and values is served"
    if not model.can_generate() or model.get_output_embeddings() is None:
        return "it has no language-model head"
    if not model.is_backend_compatible():
        return "it computes its attention itself instead of through transformers' attention interface"
    decoder = model.get_decoder()
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        return "some of its attention looks ahead, and only causal attention is served"
    return None


def _objection_to_placement(model: PreTrainedModel) -> str | None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or "meta" in devices:
        return f"its parameters are on {', '.join(devices)}, and one device must hold them all"
    return None


def _has_learned_positions(model: Any, embeddings: nn.Module, max_positions: int) -> bool:
    tables = (module for module in model.get_decoder().modules() if isinstance(module, nn.Embedding))
    return any(table is not embeddings and table.num_embeddings >= max_positions for table in tables)


def _exact_len(config: Any) -> int | None:
    """Gives the length up to which no request changes the rotary embedding of those in its step; None for any length.

    transformers switches all tokens of a call to other frequencies (longrope) or to another scale (PhiMoE) where one
    of them lies beyond the original length. "dynamic" NTK does so beyond max_position_embeddings, which none exceeds.
    """
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [
        parameters,
        *(kind for kind in parameters.values() if isinstance(kind, dict)),
    ]  # one each, or by layer type
    switching = [kind for kind in kinds if kind.get("rope_type") == "longrope" or "long_mscale" in kind]
    lengths = [kind.get("original_max_position_embeddings") for kind in switching]
    return min((length for length in lengths if length is not None), default=None)
