"""Reads new weights and checks everything about them before the model sees any."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import WeightsInvalid
from engine.openmp import alone
from engine.room import Room
from engine.weights.digests import Contents
from engine.weights.layers import Paths
from engine.weights.source import open_source
from engine.weights.staged import StagedWeights


def stage_weights(model: PreTrainedModel, path: Paths, *, cast: bool = False, partial: bool = False) -> StagedWeights:
    """Gives the weights in a folder of safetensors, ready to be committed to `model`, on its device.

    Blocks while it reads and may run beside generation: it changes neither the model nor any global state. Holds the
    new weights in memory beside the old ones. Names are mapped as `from_pretrained` maps them; of tied weights one is
    enough. path: of several folders a later one overrides the tensors of an earlier one. cast: convert tensors of
    another dtype instead of refusing them. partial: parameters that no folder names keep the values they have.
    Raises WeightsSourceError when a folder cannot be read and WeightsInvalid, which names the first few tensors of a
    kind, when one is missing, extra, of another shape or dtype, or not finite.
    """
    if getattr(model, "tp_size", None):
        raise WeightsInvalid(
            "the model is cut over tensor parallel ranks, which take new weights together; call stage_weights() of the"
            " driver's manager"
        )
    with alone():
        part = read_part(model, path, cast=cast, partial=partial)
    return StagedWeights(part.pairs, part.contents)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has read. pairs: of a tensor that lies on it and the new one; source: which files they are from."""

    pairs: list[tuple[Tensor, Tensor]]
    contents: Contents
    source: str


def read_part(
    model: PreTrainedModel,
    path: Paths,
    *,
    cast: bool = False,
    partial: bool = False,
    room: Room | None = None,
    rest: Callable[[], None] = lambda: None,
) -> Part:
    """Gives what `stage_weights` stages, and of a model that is cut over ranks the part of this one.

    Every rank reads and checks the whole source. room and rest as for `Source.parts`.
    """
    with open_source(model, path, cast=cast, partial=partial) as source:
        pairs = []
        for part in source.parts(room=room, rest=rest):
            new = part.tensor.to(part.slot.current.device)
            pairs += [(holder, new) for holder in part.slot.holders]
        return Part(pairs, source.contents(), source.files)
