"""Runs staged weights beside the model that generates: the same modules a second time, holding the new tensors."""

from collections.abc import Iterable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import WeightsError


def probe(
    model: PreTrainedModel,
    pairs: Iterable[tuple[Tensor, Tensor]],
    prompts: Sequence[Sequence[int]],
    *,
    attention: str,
) -> list[list[float]]:
    """Gives, of each prompt, the log-probability of each token but the first.

    pairs: of a tensor of the model and the one that takes its place. attention: the implementation to compute with; the
    model's own is another while it makes a step. Changes neither the model nor any global state.
    """
    second = _second(model, {id(held): spare for held, spare in pairs}, attention)
    with torch.inference_mode():
        return [_log_probabilities(second, prompt, model.device) for prompt in prompts]


def _log_probabilities(model: PreTrainedModel, prompt: Sequence[int], device: torch.device) -> list[float]:
    ids_1T = torch.tensor([list(prompt)], device=device)
    logits_TV: Tensor = model(input_ids=ids_1T, use_cache=False).logits[0, :-1]
    next_T1 = ids_1T[0, 1:, None]
    found: list[float] = torch.log_softmax(logits_TV.float(), dim=-1).gather(1, next_T1)[:, 0].tolist()
    return found


def _second(model: PreTrainedModel, spares: dict[int, Tensor], attention: str) -> PreTrainedModel:
    """Makes modules of the same kind without memory of their own, and gives them the tensors.

    Swapping tensors into the model itself, as functional calls do, would show them to the steps that run meanwhile.
    """
    config = deepcopy(model.config)
    config._attn_implementation = attention
    with torch.device("meta"):
        second: PreTrainedModel = type(model)(config)
    for name, module in model.named_modules():
        try:
            twin = second.get_submodule(name)
        except AttributeError as error:
            raise WeightsError(
                f"the model has a module {name} that its class does not make; it cannot be probed"
            ) from error
        for key, parameter in module._parameters.items():
            if parameter is not None:
                taken = spares.get(id(parameter), parameter)
                twin._parameters[key] = nn.Parameter(taken.detach(), requires_grad=False)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                twin._buffers[key] = spares.get(id(buffer), buffer).detach()
    nn.Module.eval(second)
    return second
