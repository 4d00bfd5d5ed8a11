"""The store: weights that came as tensors, kept as folders of safetensors so that everybody can read them again.

A folder is written under a name that nobody reads, made durable, and then renamed: one that has its last name is
whole. While it is written a lock says so, and the system drops the lock with the process; what a killed writer left is
removed by the next one that opens the store. Everything here blocks; call it in a thread.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from engine import WeightsError
from serve_app.durable_files import sync_folder, write_durably
from serve_app.weights.safetensors_reader import read_tensors
from serve_app.weights.safetensors_writer import SafetensorsWriter
from serve_app.weights.tensor_pieces import TensorPiece

PARTIAL, LOCK, NEW_LOCK = ".partial", ".lock", ".new-lock"
NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
"""Of a folder of the store; whatever else lies there is somebody else's and is left alone."""
INDEX_NAME = "model.safetensors.index.json"


class WeightStore:
    """The folders in one folder. Several processes may use it at once."""

    def __init__(self, folder: Path, *, history_bytes: int, is_temporary: bool = False) -> None:
        """Removes what killed writers left. history_bytes: what `prune` brings the whole store down to.

        is_temporary: the folder is where anybody may make one, so it is used only if it is this user's.
        """
        self.folder = folder
        self._history_bytes = history_bytes
        self._is_temporary = is_temporary
        # What cannot be read now is said to whoever wants to write.
        with suppress(OSError):
            self._remove_leftovers()

    def begin(self) -> "FolderWriter":
        """Gives a new folder to write to. Raises WeightsError where the store cannot be written."""
        if self._is_temporary and self.folder.exists() and self.folder.stat().st_uid != os.getuid():
            raise WeightsError(f"{self.folder} belongs to another user; set weights.store to a folder of your own")
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return FolderWriter(self.folder / f"{stamp}-{uuid.uuid4().hex[:8]}")

    def sealed(self) -> list[Path]:
        """Gives the whole folders, oldest first; none where the store cannot be read."""
        with suppress(OSError):
            return sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir())
        return []

    def size_bytes(self) -> int:
        """Gives the bytes of all whole folders."""
        return sum(_folder_bytes(path) for path in self.sealed())

    def prune(self, versions: Sequence[Sequence[str]], *, in_use: Collection[str] = ()) -> list[Path]:
        """Removes folders that no version needs, and then those of the oldest versions until the rest fits.

        versions: the folders of each remembered version, oldest first, the committed one last, which always stays.
        in_use: folders that no version has yet, sealed or about to be. Gives what was removed.
        """
        sizes = {path: _folder_bytes(path) for path in self.sealed()}
        needed = [[Path(folder) for folder in folders] for folders in versions]
        kept: set[Path] = {Path(folder) for folder in in_use}
        for place, folders in enumerate(reversed(needed)):
            grown = kept.union(folders)
            if place > 0 and sum(sizes.get(path, 0) for path in grown) > self._history_bytes:
                break
            kept = grown
        removed = [path for path in sizes if path not in kept]
        for path in removed:
            _remove(path)
        return removed

    def holds(self, folder: str) -> bool:
        """Gives whether a folder is one of this store's, by its name."""
        return Path(folder).parent == self.folder

    def _remove_leftovers(self) -> None:
        if not self.folder.is_dir():
            return
        for lock in (*self._ours(LOCK), *self._ours(NEW_LOCK)):
            if _is_free(lock):
                shutil.rmtree(lock.with_suffix(PARTIAL), ignore_errors=True)
                lock.unlink(missing_ok=True)
        for partial in self._ours(PARTIAL):
            if not partial.with_suffix(LOCK).exists():
                shutil.rmtree(partial, ignore_errors=True)

    def _ours(self, suffix: str) -> list[Path]:
        return [path for path in self.folder.glob(f"*{suffix}") if NAME.fullmatch(path.stem)]


class FolderWriter:
    """One folder in the making. Ends with `seal` or `drop`; whatever raises has dropped it already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder.with_suffix(PARTIAL)
        self._tensors = SafetensorsWriter(self._partial)
        self._lock = -1
        try:
            # The last part alone: what a lost mount leaves must not be filled.
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            self._lock = _take_lock(folder)
            self._partial.mkdir()
        except OSError as error:
            self.drop()
            raise self._failure(error) from error

    @property
    def path(self) -> str:
        """The last name of the folder, which it has once it is sealed."""
        return str(self._folder)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors so far."""
        return self._tensors.size_bytes

    @property
    def names(self) -> Collection[str]:
        """The tensors so far."""
        return self._tensors.names

    def append(self, pieces: Iterable[TensorPiece]) -> None:
        """Writes the pieces; those of one tensor come in order and without another between them.

        A tensor that came already is compared. Raises WeightsInvalid where it differs, InvalidRequest for pieces out
        of order, and WeightsError for a disk that is full.
        """
        try:
            for piece in pieces:
                self._tensors.append(piece)
        except OSError as error:
            self.drop()
            raise self._failure(error) from error
        except BaseException:
            self.drop()
            raise

    def fill(self, folders: Sequence[str]) -> list[str]:
        """Adds the tensors that did not come, each from the last of the folders that has it; gives their names.

        The folder is then whole without those it was to lie over. Raises WeightsSourceError where one cannot be read.
        """
        filled = []
        for folder in reversed(folders):
            for name, pieces in read_tensors(folder):
                if name not in self.names:
                    self.append(pieces)
                    filled.append(name)
        return sorted(filled)

    def seal(self) -> str:
        """Makes the folder durable under its last name, and gives that. Raises WeightsError where it is not whole."""
        try:
            names = self._tensors.finish()
            if names:
                index = json.dumps({"metadata": {"total_size": self.size_bytes}, "weight_map": names})
                write_durably(self._partial / INDEX_NAME, index.encode())
            sync_folder(self._partial)
            self._partial.rename(self._folder)
            sync_folder(self._folder.parent)
        except OSError as error:
            self.drop()
            raise self._failure(error) from error
        except BaseException:
            self.drop()
            raise
        self._release()
        return self.path

    def drop(self) -> None:
        """Removes the folder, whole or not."""
        self._tensors.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        _remove(self._folder)
        self._release()

    def _release(self) -> None:
        with suppress(OSError):
            self._folder.with_suffix(LOCK).unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _failure(self, error: OSError) -> WeightsError:
        return WeightsError(
            f"the weights cannot be written to {self._folder.parent}: {error.strerror}; see to the disk of "
            "weights.store (weights.history_bytes bounds what is kept there) and send them again"
        )


def _take_lock(folder: Path) -> int:
    """Gives a locked descriptor; the lock gets its name only when it is locked, so nobody takes it for a dead one's."""
    new = folder.with_suffix(NEW_LOCK)
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder.with_suffix(LOCK))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _folder_bytes(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def _remove(folder: Path) -> None:
    """Removes a whole folder so that no reader finds half of it under its name."""
    hidden = folder.with_suffix(PARTIAL)
    with suppress(OSError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
