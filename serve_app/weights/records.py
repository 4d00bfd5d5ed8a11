"""What is known of each version tensor by tensor: a file a version beside the manifest, which holds its SHA-256."""

import hashlib
import json
from collections.abc import Set
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from serve_app.durable_files import sync_folder, write_durably
from serve_app.messages import StagedDetails
from serve_app.protocol.errors import ManifestError

FOLDER_NAME = "digests"

_ADAPTER = TypeAdapter(StagedDetails)


class WeightRecords:
    """The records in a folder, or in memory where there is none. Everything here blocks; call it in a thread."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder) / FOLDER_NAME
        self._in_memory: dict[int, bytes] = {}

    def write(self, version: int, details: StagedDetails) -> str:
        """Keeps what is known of a version, durably where there is a folder, and gives its SHA-256.

        Takes the place of what a swap that was not committed has left under this number. Raises ManifestError.
        """
        content = json.dumps(asdict(details), indent=0).encode()
        if self._folder is None:
            self._in_memory[version] = content
        else:
            self._write(self._folder, version, content)
        return hashlib.sha256(content).hexdigest()

    def read(self, version: int, sha256: str) -> StagedDetails | None:
        """Gives what was kept; None where it is gone or not what was kept."""
        try:
            content = self._in_memory[version] if self._folder is None else _path(self._folder, version).read_bytes()
        except (OSError, KeyError):
            return None
        return _ADAPTER.validate_json(content) if hashlib.sha256(content).hexdigest() == sha256 else None

    def keep_only(self, versions: Set[int]) -> None:
        """Forgets the records of all other versions; one that cannot be deleted stays."""
        for version in self._in_memory.keys() - versions:
            del self._in_memory[version]
        if self._folder is None:
            return
        for path in self._folder.glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) not in versions:
                with suppress(OSError):
                    path.unlink()

    def _write(self, folder: Path, version: int, content: bytes) -> None:
        path = _path(folder, version)
        try:
            folder.mkdir(exist_ok=True)
            beside = path.with_suffix(".new")
            write_durably(beside, content)
            beside.replace(path)
            sync_folder(folder)
            sync_folder(folder.parent)
        except OSError as error:
            raise ManifestError(
                f"{path} cannot be written: {error.strerror}; see to the disk of weights.folder and try again"
            ) from error


def _path(folder: Path, version: int) -> Path:
    return folder / f"{version}.json"
