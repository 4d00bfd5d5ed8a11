"""New weights for which there is no room beside the old ones: read again and copied in while the loop is parked.

Staging has verified all of them, tensor by tensor. What the model holds is written to an undo log on disk before it is
overwritten, so that an error half way brings back exactly the old weights.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import WeightsError, WeightsLost, WeightsSourceError
from engine.weights.layers import Paths, path_list
from engine.weights.slots import distinct, slots_of
from engine.weights.source import Source, open_source
from engine.weights.staged import StagedWeights


def bytes_beside(model: PreTrainedModel, paths: Paths, *, cast: bool, partial: bool) -> int:
    """Gives what the new weights take beside the old ones, by the headers of the files; raises as staging does."""
    with open_source(model, paths, cast=cast, partial=partial) as source:
        return source.needed_bytes


def stage_streamed(
    model: PreTrainedModel,
    paths: Paths,
    *,
    cast: bool = False,
    partial: bool = False,
    undo_folder: str,
    rest: Callable[[], None] = lambda: None,
) -> "StreamedWeights":
    """Gives weights of which everything is checked and nothing kept in memory; raises as `stage_weights` does.

    rest: as for `Source.parts`. Raises WeightsError when the old weights do not fit the disk of `undo_folder`.
    """
    with open_source(model, paths, cast=cast, partial=partial) as source:
        _check_disk(Path(undo_folder), source.needed_bytes)
        for _ in source.parts(rest=rest):
            pass
        return StreamedWeights(source, path_list(paths), cast=cast, partial=partial, undo_folder=undo_folder)


class StreamedWeights(StagedWeights):
    """Weights in files, verified. The commit reads them again, and refuses what is not what was verified.

    Invariant: outside of a call the model holds all of the one set or all of the other.
    """

    is_streamed = True

    def __init__(self, source: Source, paths: list[str], *, cast: bool, partial: bool, undo_folder: str) -> None:
        """Takes an opened source that was read to its end."""
        super().__init__((), source.contents())
        self.num_tensors = sum(not slot.is_optional for slot in distinct(source.slots)) - source.num_unchanged
        self.size_bytes = source.needed_bytes
        self._model = source.model
        self._paths = paths
        self._cast, self._partial = cast, partial
        self._files = source.files
        self._undo_folder = undo_folder
        self._layout = _layout_of(source.model)
        self._undo: UndoLog | None = None

    def release_old(self) -> None:
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def rollback(self) -> None:
        """Gives the model its old weights back, as long as the log is there; nothing to do unless committed."""
        if self.is_committed and self._undo is None:
            raise WeightsError("the old weights were overwritten and are not held any more; stage them anew")
        super().rollback()

    def discard(self) -> None:
        self.release_old()
        super().discard()

    def _exchange(self) -> None:
        if self._undo is not None:  # a rollback
            self._undo.restore()
            self.release_old()
            return
        if _layout_of(self._model) != self._layout:
            raise WeightsError("the model was moved or changed after these weights were staged; stage them again")
        undo = UndoLog(self._undo_folder)
        try:
            self._read_into_model(undo)
        except BaseException:
            with undo:
                undo.restore()
            raise
        self._undo = undo

    def _read_into_model(self, undo: "UndoLog") -> None:
        with open_source(self._model, self._paths, cast=self._cast, partial=self._partial) as source:
            if source.files != self._files:
                raise WeightsSourceError(
                    f"the files in {' and '.join(self._paths)} were changed after they were staged; stage them again"
                )
            for part in source.parts():
                name = part.slot.names[0]
                if not part.slot.is_optional and part.digest != self.digests[name]:
                    raise WeightsSourceError(f"{name} is not what it was when it was staged; stage it again")
                undo.save(part.slot.current)
                with torch.no_grad():
                    part.slot.current.copy_(part.tensor)


class UndoLog:
    """The old values of tensors, on disk before they are overwritten.

    The file has no name, so that a process which dies leaves none behind.
    """

    def __init__(self, folder: str) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # `close` closes it
        self._saved: list[tuple[Tensor, int, int]] = []

    def save(self, tensor: Tensor) -> None:
        """Writes a tensor and waits until the disk has it. Raises OSError, and then the tensor is not in the log."""
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        start = self._saved[-1][1] + self._saved[-1][2] if self._saved else 0
        position, rest = start, plain
        while rest:
            count = os.pwrite(self._file.fileno(), rest, position)
            rest, position = rest[count:], position + count
        os.fsync(self._file.fileno())
        self._saved.append((tensor, start, plain.nbytes))

    def restore(self) -> None:
        """Gives all tensors their old values. Raises WeightsLost when one cannot be read: they are mixed then."""
        try:
            for tensor, start, num_bytes in reversed(self._saved):
                self._restore(tensor, start, num_bytes)
        except Exception as error:  # Whatever the disk or the device says: the old weights are needed now.
            raise WeightsLost(
                f"the old weights cannot be brought back from the undo log ({error}), and the new ones are not whole;"
                " replace the process"
            ) from error

    def _restore(self, tensor: Tensor, start: int, num_bytes: int) -> None:
        old = torch.empty(num_bytes, dtype=torch.uint8)
        buffer, position = old.numpy().data, start
        while buffer:
            count = os.preadv(self._file.fileno(), [buffer], position)
            if count == 0:
                raise OSError("it was cut short")
            buffer, position = buffer[count:], position + count
        with torch.no_grad():
            tensor.copy_(old.view(tensor.dtype).reshape(tensor.shape))

    def close(self) -> None:
        """Gives the disk back."""
        self._saved.clear()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _check_disk(folder: Path, needed: int) -> None:
    if not folder.is_dir():
        raise WeightsError(f"undo_folder is {str(folder)!r}, and there is no such folder; make it")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise WeightsError(
            f"{folder} has room for {free / 2**20:.0f} MiB, and the old weights take {needed / 2**20:.0f} MiB there"
            " while they are replaced; free it or name another undo_folder"
        )


def _layout_of(model: PreTrainedModel) -> list[object]:
    """What must be as it was when the source was checked against the model."""
    return [(name, slot.shape, slot.current.dtype, slot.current.device) for name, slot in slots_of(model).items()]
