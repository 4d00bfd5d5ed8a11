"""Checks weights where nothing serves them: against a model without memory, one tensor after the other."""

from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from engine.errors import WeightsInvalid
from engine.model import load_config, parse_dtype
from engine.weights import Contents, Paths, open_source


@dataclass(frozen=True)
class CheckedWeights:
    """What a source holds for a model, as `StagedWeights` has it."""

    digests: dict[str, str]
    num_bytes: int
    unchanged: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """One digest over all of them."""
        return Contents(self.digests).digest


def check_weights(
    config_folder: str | PathLike[str],
    path: Paths,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    cast: bool = False,
    changes: Paths = (),
    cast_changes: bool = False,
    trust_remote_code: bool = False,
) -> CheckedWeights:
    """Gives the digests that a replica which loads `config_folder` and stages `path` gets, if it is not cut over ranks.

    Holds one parameter at a time. config_folder: a folder or hub id with the config of the model; path and cast as for
    `stage_weights`; dtype and device as the replica's `load_model` gets them, though nothing is put on the device: it
    says what "auto" means. changes: the last layers of path, where they are a partial source over what is served, and
    cast_changes whether they may be of another dtype; what they leave is unchanged. Raises what `stage_weights` raises,
    and while it runs the process makes no other model.
    """
    target = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    model = _empty_model(fspath(config_folder), parse_dtype(dtype, target), trust_remote_code)
    unchanged: tuple[str, ...] = ()
    if changes:
        with open_source(model, changes, cast=cast_changes, partial=True) as source:
            unchanged = source.unchanged
    with open_source(model, path, cast=cast) as source:
        for _ in source.parts():
            pass
        contents = source.contents()
    return CheckedWeights(dict(contents.digests), contents.num_bytes, unchanged)


def _empty_model(path: str, dtype: torch.dtype | str, trust_remote_code: bool) -> PreTrainedModel:
    config = load_config(path, trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise WeightsInvalid("the model is quantized, and its weights cannot be replaced; load it unquantized")
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=wanted, trust_remote_code=trust_remote_code
        )
    _keep_wide(model, wanted)
    return model


def _keep_wide(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes those parameters float32 that `from_pretrained` keeps so in a narrow model."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, _, _ = build_glob_alternation(list(plan))
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.float()
