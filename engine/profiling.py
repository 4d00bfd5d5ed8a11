"""What a step takes of a GPU's memory, found out by running one."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.interface import STEP_ARGUMENT, attention_configs, no_attention, use_step
from engine.errors import InvalidRequest


def measured_step_bytes(model: PreTrainedModel, *, num_tokens: int, num_rows: int) -> int:
    """Gives the most that a step of so many tokens, of which so many rows sample, holds at once beside the weights.

    What attention reads of the cache is not in it. Raises InvalidRequest when the step does not fit the GPU.
    """
    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        dummy_step(model, num_tokens=num_tokens, num_rows=num_rows)
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidRequest(
            f"a step of {num_tokens} tokens does not fit the GPU beside the weights; lower max_batch_tokens",
            "max_batch_tokens",
        ) from error
    most = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return most


def dummy_step(model: PreTrainedModel, *, num_tokens: int, num_rows: int) -> Tensor:
    """Runs tokens 0 through the model without a cache, and gives the probabilities of the last rows."""
    takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    ids_1T = torch.zeros(1, num_tokens, dtype=torch.long, device=model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), use_step(attention_configs(model)):
            output = model(
                input_ids=ids_1T,
                position_ids=ids_1T,
                use_cache=False,
                **({"logits_to_keep": min(num_rows, num_tokens)} if takes_rows else {}),
                **{STEP_ARGUMENT: no_attention},
            )
            logits_RV: Tensor = output.logits[0, -min(num_rows, num_tokens) :]
            return logits_RV.float().softmax(dim=-1)
    finally:
        model.train(was_training)
