"""An opened source of weights: checked against a model by its headers, then read one parameter after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import WeightsInvalid
from engine.room import Filling, Room
from engine.weights.digests import CHUNK_BYTES, Contents, Scan, digest_of, scan
from engine.weights.folder import files_behind
from engine.weights.layers import Layer, Paths, Piece, open_layers, path_list, plan_pieces
from engine.weights.slots import Slot, distinct, matcher, slots_of

_NUM_NAMES_SHOWN = 3


class Problems:
    """What does not fit, by kind; raised all at once, so that a caller sees missing and extra names side by side."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._found: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, name: str, detail: str = "") -> None:
        self._found.setdefault(kind, []).append((name, f"{name} ({detail})" if detail else name))

    def raise_if_any(self) -> None:
        if not self._found:
            return
        parts = []
        for kind, tensors in self._found.items():
            shown = ", ".join(text for _, text in tensors[:_NUM_NAMES_SHOWN])
            more = f" and {len(tensors) - _NUM_NAMES_SHOWN} more" if len(tensors) > _NUM_NAMES_SHOWN else ""
            parts.append(f"{len(tensors)} {kind}: {shown}{more}")
        first_name = next(iter(self._found.values()))[0][0]
        raise WeightsInvalid(f"the weights in {self._source} do not fit the model; {'; '.join(parts)}", first_name)


@dataclass(frozen=True, slots=True)
class NewPart:
    """What a slot is to hold, checked, on the CPU: all of it, or of a parameter that is cut the part of this rank."""

    slot: Slot
    tensor: Tensor
    digest: str


@dataclass(slots=True)
class Source:
    """Readable while its files are open. Whoever reads `parts` to the end has checked everything."""

    model: PreTrainedModel
    slots: dict[str, Slot]
    pieces: list[Piece]
    problems: Problems
    unchanged: tuple[str, ...]
    files: str
    """Which files were read; the same text where two have read the same."""
    _made: dict[int, NewPart] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.size_bytes for piece in self.pieces for tensor in piece.stored.values())

    @property
    def num_unchanged(self) -> int:
        """How many storages keep their values; tied parameters share one."""
        return len({id(self.slots[name]) for name in self.unchanged})

    @property
    def needed_bytes(self) -> int:
        """What the parts of this rank take in memory."""
        made = {id(self.slots[name]): self.slots[name] for piece in self.pieces for name in piece.targets}
        return sum(slot.current.numel() * slot.current.element_size() for slot in made.values())

    def parts(self, *, room: Room | None = None, rest: Callable[[], None] = lambda: None) -> Iterator[NewPart]:
        """Reads and gives each part once. Raises WeightsSourceError at once, and WeightsInvalid for all that does not
        fit when everything was read.

        room: where the parts are to lie. rest: called every few megabytes.
        """
        self._made.clear()
        filling = (room or Room()).filling()
        for piece in self.pieces:
            slot = self.slots[piece.recipe.targets[0]]
            if piece.is_plain and slot.cut is None:
                yield from self._read_plain(piece, slot, filling, rest)
            else:
                for name, tensor in piece.make(self.model, self.slots).items():
                    yield from self._checked(name, tensor)
                    rest()
        self.problems.raise_if_any()

    def contents(self) -> Contents:
        """Gives what was read, when all was read; parameters that keep their values are read in the model."""
        digests = {name: part.digest for part in self._digested() for name in part.slot.names}
        for name in self.unchanged:
            if name not in digests:
                slot = self.slots[name]
                digests.update(dict.fromkeys(slot.names, digest_of(slot.current)))
        return Contents(digests, self.unchanged, self.num_bytes)

    def _digested(self) -> Iterable[NewPart]:
        return (part for part in self._made.values() if not part.slot.is_optional)

    def _read_plain(self, piece: Piece, slot: Slot, filling: Filling, rest: Callable[[], None]) -> Iterator[NewPart]:
        """Reads one tensor to where it is to lie, and looks at each of its values while the cache has it."""
        name = piece.recipe.targets[0]
        (stored,) = piece.stored.values()
        tensor = filling.empty(stored.shape, slot.current.dtype)
        found = Scan(tensor.shape, tensor.dtype)
        for values in stored.read_chunks(tensor, CHUNK_BYTES // tensor.dtype.itemsize):
            found.add(values)
            rest()
        yield from self._part(name, tensor, found)

    def _checked(self, name: str, tensor: Tensor) -> Iterator[NewPart]:
        slot = self.slots[name]
        if tensor.shape != slot.shape:
            self.problems.add("of another shape", name, f"{list(tensor.shape)}, must be {list(slot.shape)}")
            return
        tensor = tensor.contiguous()
        found = scan(tensor)
        if slot.cut is not None and found.is_finite:
            tensor = slot.cut.take(tensor)
            found = scan(tensor)
        yield from self._part(name, tensor, found)

    def _part(self, name: str, tensor: Tensor, found: Scan) -> Iterator[NewPart]:
        """Gives a part, unless it is not finite, or another name of it has brought it."""
        slot = self.slots[name]
        if not found.is_finite:
            self.problems.add("not finite", name)
            return
        part = NewPart(slot, tensor, found.digest)
        before = self._made.get(id(slot))
        if before is None:
            # The tensor is whoever reads it's to keep.
            self._made[id(slot)] = NewPart(slot, tensor.new_empty(0), part.digest)
            yield part
        elif before.digest != part.digest:
            others = next(other for other in slot.names if other != name)
            self.problems.add("tied in the model and different here", name, f"tied to {others}")


@contextmanager
def open_source(model: PreTrainedModel, paths: Paths, *, cast: bool = False, partial: bool = False) -> Iterator[Source]:
    """Opens layers of weights and checks names, shapes and types as their headers say them.

    partial: what no layer has keeps its value. Raises WeightsSourceError and WeightsInvalid; also at the end, when a
    file was written to meanwhile.
    """
    if getattr(model, "is_quantized", False):
        raise WeightsInvalid("the model is quantized, and its weights cannot be replaced; load it unquantized")
    slots = slots_of(model)
    names = path_list(paths)
    problems = Problems(" and ".join(names))
    with open_layers(names) as layers:
        pieces, extra = plan_pieces(model, layers, slots)
        missing = _missing(pieces, slots)
        _check_names(model, [] if partial else missing, extra, problems)
        for piece in pieces:
            _check_headers(piece, slots, problems, cast=cast)
        problems.raise_if_any()
        unchanged = tuple(name for slot in missing for name in slot.names)
        yield Source(model, slots, pieces, problems, unchanged, files=_files(layers))


def _missing(pieces: Iterable[Piece], slots: Mapping[str, Slot]) -> list[Slot]:
    made = {target for piece in pieces for target in piece.targets}
    return [slot for slot in distinct(slots) if not slot.is_optional and made.isdisjoint(slot.names)]


def _check_names(model: PreTrainedModel, missing: Iterable[Slot], extra: Iterable[str], problems: Problems) -> None:
    for slot in missing:
        problems.add("missing", slot.names[0])
    ignored = matcher(model._keys_to_ignore_on_load_unexpected)
    for name in extra:
        if not ignored.search(name):
            problems.add("unknown to the model", name)


def _check_headers(piece: Piece, slots: Mapping[str, Slot], problems: Problems, *, cast: bool) -> None:
    slot = slots[piece.recipe.targets[0]]
    for name in piece.recipe.source_names:
        stored = piece.stored[name]
        if not cast and stored.dtype != slot.current.dtype:
            problems.add("of another dtype", name, f"{stored.dtype}, must be {slot.current.dtype}")
        if piece.recipe.converter is None and stored.shape != slot.shape:
            problems.add("of another shape", name, f"{list(stored.shape)}, must be {list(slot.shape)}")


def _files(layers: Iterable[Layer]) -> str:
    return " | ".join(files_behind(layer.values()) for layer in layers)
