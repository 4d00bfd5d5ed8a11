"""The manifest: the committed version and its history, one small file in a folder, so that they outlive every process.

The file is only ever replaced whole: written beside, made durable, renamed over, the folder made durable. Whoever reads
it finds one manifest or the one before it. Every controller that opens the folder takes the next term, and a write of
an earlier term is refused: of two controllers on one folder (an upgrade runs old and new side by side) the later one
commits. Everything here blocks; call it in a thread.
"""

import fcntl
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from serve_app.durable_files import sync_folder, write_durably
from serve_app.messages import CommittedVersion
from serve_app.protocol.errors import ManifestError, ManifestTaken

FILE_NAME = "manifest.json"
LOCK_NAME = "manifest.lock"
FORMAT = 1
"""Of the file; another number is another release's."""
LOCK_TIMEOUT_S = 10.0
"""A holder reads and writes one small file; only a disk that hangs takes as long."""
LOCK_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a controller has to know after a restart.

    application and model say whose manifest it is: the name in Serve, and what the application was started with.
    versions are those committed, oldest first; the last one is what every replica has to serve.
    last_version is the highest number ever given, also to a swap that was taken back.
    term counts the controllers, sequence the writes; owner is the controller of the term, for people.
    line is made up with the first manifest of a folder and stays: it tells its controllers from those of other folders.
    """

    application: str
    model: str
    versions: tuple[CommittedVersion, ...]
    last_version: int
    term: int = 0
    sequence: int = 0
    owner: str = ""
    line: str = ""


_ADAPTER = TypeAdapter(Manifest)


class ManifestFile:
    """The manifest of one folder, in the hands of one controller.

    Raises ManifestError for whatever goes wrong, and what was in the folder before stays.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / FILE_NAME
        self._term = 0

    def claim(self, fresh: Manifest) -> Manifest:
        """Takes the next term; gives what the folder holds, or `fresh`, now written, where it holds none.

        Raises ManifestError where the folder holds the manifest of another application or model.
        """
        with self._locked():
            found = self._read()
            if found is not None:
                self._check_owner(found, fresh)
            held = found or fresh
            claimed = replace(
                held,
                term=held.term + 1,
                sequence=held.sequence + 1,
                owner=_this_process(),
                line=held.line or uuid.uuid4().hex,
            )
            self._replace(claimed, before=found)
        self._term = claimed.term
        return claimed

    def check_term(self) -> None:
        """Raises ManifestTaken once another controller has claimed the folder."""
        self._check_term(self._read())

    def write(self, manifest: Manifest) -> None:
        """Makes this the durable manifest; its term and sequence are set here. Raises ManifestTaken."""
        with self._locked():
            held = self._check_term(self._read())
            following = replace(manifest, term=held.term, sequence=held.sequence + 1, owner=held.owner)
            self._replace(following, before=held)

    def _check_owner(self, found: Manifest, fresh: Manifest) -> None:
        if (found.application, found.model) != (fresh.application, fresh.model):
            raise ManifestError(
                f"{self._path} belongs to application {found.application!r} with model {found.model}, not to "
                f"{fresh.application!r} with model {fresh.model}; give each a weights.folder of its own, or delete the "
                "file to begin anew at version 1"
            )

    def _check_term(self, held: Manifest | None) -> Manifest:
        if held is None:
            raise ManifestError(f"{self._path} is gone; bring it back, or restart the application to write a new one")
        if held.term > self._term:
            raise ManifestTaken(
                f"{self._path} was taken over by another controller ({held.owner}, term {held.term}; this one has term "
                f"{self._term}); swap there, or restart this application to take it back"
            )
        if held.term < self._term:
            raise ManifestError(
                f"{self._path} is an older copy (term {held.term}, this controller has {self._term}); restart the "
                "application to go on from it"
            )
        return held

    def _read(self) -> Manifest | None:
        try:
            return _decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ManifestError(f"{self._path} cannot be read: {error.strerror}; make it readable") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = str(error) if type(error) in (ValueError, json.JSONDecodeError) else "its fields do not fit"
            raise ManifestError(
                f"{self._path} is damaged or not from this release ({reason}); put a good copy in its place, or delete "
                "it to begin anew at the configured model"
            ) from None

    def _replace(self, manifest: Manifest, *, before: Manifest | None) -> None:
        try:
            self._rename_over(_encode(manifest))
            try:
                sync_folder(self._folder)
            except OSError:
                # The caller takes it for not written, so a restart must not find it.
                if before is not None:
                    self._rename_over(_encode(before))
                raise
        except OSError as error:
            raise ManifestError(
                f"{self._path} cannot be written: {error.strerror}; see to the disk of weights.folder and try again"
            ) from error

    def _rename_over(self, content: bytes) -> None:
        # One name, as the lock is held: what a crash leaves behind is written over.
        beside = self._path.with_suffix(".new")
        try:
            write_durably(beside, content)
            beside.replace(self._path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the folder, which ends with the descriptor, so also with the process."""
        try:
            # For writing, because NFS gives an exclusive lock to no other descriptor.
            descriptor = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            raise ManifestError(f"weights.folder {self._folder} does not exist; make or mount it") from None
        except OSError as error:
            raise ManifestError(
                f"weights.folder {self._folder} cannot be written: {error.strerror}; it must be a folder that the "
                "controller may write"
            ) from error
        try:
            self._wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ManifestError(
                        f"{self._folder / LOCK_NAME} is held by another process for {LOCK_TIMEOUT_S:g} s; end it"
                    ) from None
            except OSError as error:
                raise ManifestError(
                    f"weights.folder {self._folder} is on a disk without locks: {error.strerror}; choose another"
                ) from error
            time.sleep(LOCK_RETRY_S)


def _encode(manifest: Manifest) -> bytes:
    content = asdict(manifest)
    return json.dumps({"format": FORMAT, "sha256": _digest(content), "manifest": content}, indent=1).encode() + b"\n"


def _decode(content: bytes) -> Manifest:
    values = json.loads(content)
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']}, this release reads {FORMAT}")
    if values["sha256"] != _digest(values["manifest"]):
        raise ValueError("its content does not match its sha256")
    manifest = _ADAPTER.validate_python(values["manifest"])
    if not manifest.versions:
        raise ValueError("it names no version")
    return manifest


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
