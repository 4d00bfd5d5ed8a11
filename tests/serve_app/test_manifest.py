"""The manifest: whole or as before whatever ends a write, one controller at a time, never trusted when damaged."""

import json
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from serve_app.messages import CommittedVersion, SwapResult, WeightSource
from serve_app.protocol.errors import ManifestError, ManifestTaken
from serve_app.weights import manifest as manifest_module
from serve_app.weights.manifest import FILE_NAME, LOCK_NAME, Manifest, ManifestFile

NOBODY = 65534
SWAPPED = CommittedVersion(
    2,
    WeightSource("/weights/ü"),
    label="step 100",
    swap_id="s",
    committed_at="2026-01-02T03:04:05+00:00",
    requested_by="HTTP from ::1",
    idempotency_key="k",
    result=SwapResult(2, 1, ["a", "b"], staged_s=0.1, paused_s=1 / 3, total_s=0.7, swap_id="s", lagging=["c"]),
)
FRESH = Manifest("pitstop", "/models/base", (CommittedVersion(1),), last_version=1)


def second(held: Manifest) -> Manifest:
    return replace(held, versions=(*held.versions, SWAPPED), last_version=2)


def content(folder: Path) -> bytes:
    return (folder / FILE_NAME).read_bytes()


def test_what_is_written_is_found_again_by_the_next_controller(tmp_path: Path) -> None:
    first = ManifestFile(str(tmp_path))
    held = first.claim(FRESH)
    assert (held.versions, held.term) == (FRESH.versions, 1)
    first.write(second(held))
    found = ManifestFile(str(tmp_path)).claim(FRESH)
    assert found.versions == (*FRESH.versions, SWAPPED)
    assert (found.last_version, found.term) == (2, 2)
    assert found.line == held.line
    assert found.sequence > held.sequence
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, LOCK_NAME]


def test_manifests_of_two_folders_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (ManifestFile(str(folder)).claim(FRESH) for folder in folders)
    assert one.line
    assert one.line != two.line


def in_child(work: Callable[[], None]) -> int:
    """Starts `work` in a process of its own, which has nothing but its files; gives the process id."""
    with warnings.catch_warnings():
        # Later Pythons warn of threads, which are not there in the child; it touches none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def killed_before(line: int, work: Callable[[], None]) -> Callable[[], None]:
    """Gives `work`, ended by SIGKILL before it executes so many lines of the manifest's module."""

    def traced() -> None:
        seen = 0

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != manifest_module.__file__:
                return None
            if event == "line":
                if seen == line:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
            return trace

        sys.settrace(trace)
        work()

    return traced


def test_a_writer_killed_anywhere_leaves_the_old_manifest_or_the_new_one(tmp_path: Path) -> None:
    found: list[int] = []
    is_killed = True
    while is_killed:
        file = ManifestFile(str(tmp_path))
        old = replace(file.claim(FRESH), versions=FRESH.versions)
        file.write(old)
        child = in_child(killed_before(len(found), partial(file.write, second(old))))
        is_killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        found.append(len(ManifestFile(str(tmp_path)).claim(FRESH).versions))
    # Before the rename always the old one, after it always the new one.
    assert found == sorted(found)
    assert found.count(1) > 10
    assert found.count(2) > 3


def test_the_content_is_durable_before_its_name_and_the_name_before_the_write_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ManifestFile(str(tmp_path))
    held = file.claim(FRESH)
    order: list[str] = []
    sync, rename = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        order.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        order.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_rename)
    file.write(second(held))
    assert order == ["sync manifest.new", f"rename manifest.new {FILE_NAME}", f"sync {tmp_path.name}"]


def test_a_rename_that_cannot_be_made_durable_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ManifestFile(str(tmp_path))
    held = file.claim(FRESH)

    def fail(_folder: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "sync_folder", fail)
        with pytest.raises(ManifestError, match="cannot be written: Input/output error"):
            file.write(second(held))
    assert ManifestFile(str(tmp_path)).claim(FRESH).versions == FRESH.versions


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """A disk that takes no more than so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size_bytes", [0, 1, 200])
def test_a_disk_without_room_refuses_and_keeps_the_old_manifest(tmp_path: Path, size_bytes: int) -> None:
    file = ManifestFile(str(tmp_path))
    held = file.claim(FRESH)
    before = content(tmp_path)
    with largest_file(size_bytes), pytest.raises(ManifestError, match=r"manifest\.json cannot be written: File too la"):
        file.write(second(held))
    assert content(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, LOCK_NAME]
    file.write(second(held))


@pytest.fixture
def read_only_folder() -> Iterator[str]:
    """A folder with a manifest that may be read and not changed; outside tmp_path, whose parents are closed."""
    with tempfile.TemporaryDirectory(prefix="pitstop-test-") as name:
        folder = Path(name)
        ManifestFile(name).claim(FRESH)
        folder.chmod(0o555)
        (folder / LOCK_NAME).chmod(0o444)
        is_root = os.geteuid() == 0
        if is_root:
            # Permissions do not bind root.
            os.seteuid(NOBODY)
        try:
            yield name
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_a_read_only_folder_is_refused_by_name(read_only_folder: str) -> None:
    with pytest.raises(ManifestError, match=f"{read_only_folder} cannot be written: Permission denied"):
        ManifestFile(read_only_folder).claim(FRESH)


def test_a_folder_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ManifestError, match="missing does not exist; make or mount it"):
        ManifestFile(str(missing)).claim(FRESH)
    assert not missing.exists()


def test_a_manifest_that_vanished_is_not_written_over(tmp_path: Path) -> None:
    file = ManifestFile(str(tmp_path))
    held = file.claim(FRESH)
    (tmp_path / FILE_NAME).unlink()
    for attempt in (file.check_term, lambda: file.write(second(held))):
        with pytest.raises(ManifestError, match=r"manifest\.json is gone"):
            attempt()
    assert not (tmp_path / FILE_NAME).exists()


def test_a_manifest_cut_off_anywhere_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = ManifestFile(str(tmp_path))
    file.write(second(file.claim(FRESH)))
    whole = content(tmp_path)
    for length in range(0, len(whole) - 2, 7):
        (tmp_path / FILE_NAME).write_bytes(whole[:length])
        with pytest.raises(
            ManifestError, match=r"manifest\.json is damaged .* put a good copy in its place, or delete"
        ):
            ManifestFile(str(tmp_path)).claim(FRESH)
        assert content(tmp_path) == whole[:length]


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b"[" * 100_000,
        b'{"format": 2, "sha256": "", "manifest": {}}',
        b'{"format": 1, "sha256": "", "manifest": {}}',
        b'{"format": 1, "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", "manifest": {}}',
    ],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damaged)
    with pytest.raises(ManifestError, match=r"manifest\.json is damaged or not from this release") as caught:
        ManifestFile(str(tmp_path)).claim(FRESH)
    assert "\n" not in str(caught.value)


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    file = ManifestFile(str(tmp_path))
    file.write(second(file.claim(FRESH)))
    values = json.loads(content(tmp_path))
    values["manifest"]["last_version"] = 3
    (tmp_path / FILE_NAME).write_text(json.dumps(values))
    with pytest.raises(ManifestError, match="does not match its sha256"):
        file.check_term()


def test_of_two_controllers_the_earlier_one_is_refused_by_name(tmp_path: Path) -> None:
    blue, green = ManifestFile(str(tmp_path)), ManifestFile(str(tmp_path))
    held = blue.claim(FRESH)
    green_held = green.claim(FRESH)
    before = content(tmp_path)
    for attempt in (blue.check_term, lambda: blue.write(second(held))):
        with pytest.raises(ManifestTaken, match=r"taken over by another controller \(process \d+ on .*, term 2;"):
            attempt()
    assert content(tmp_path) == before
    green.write(second(green_held))
    assert blue.claim(FRESH).term == 3


def test_a_copy_of_an_earlier_term_is_not_written_over(tmp_path: Path) -> None:
    ManifestFile(str(tmp_path)).claim(FRESH)
    backup = content(tmp_path)
    later = ManifestFile(str(tmp_path))
    held = later.claim(FRESH)
    (tmp_path / FILE_NAME).write_bytes(backup)
    with pytest.raises(ManifestError, match=r"an older copy \(term 1, this controller has 2\)"):
        later.write(held)


def test_claims_at_once_get_terms_of_their_own(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def claim() -> None:
        for _ in range(20):
            os.write(writing, bytes([ManifestFile(str(tmp_path)).claim(FRESH).term]))

    children = [in_child(claim) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    os.close(writing)
    with os.fdopen(reading, "rb") as terms:
        assert sorted(terms.read()) == list(range(1, 61))


def test_a_lock_that_is_never_freed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "LOCK_TIMEOUT_S", 0.05)
    file = ManifestFile(str(tmp_path))
    held = file.claim(FRESH)
    with file._locked(), pytest.raises(ManifestError, match=r"manifest\.lock is held by another process"):
        ManifestFile(str(tmp_path)).claim(FRESH)
    file.write(held)


@pytest.mark.parametrize("other", [replace(FRESH, application="other"), replace(FRESH, model="/models/other")])
def test_the_manifest_of_another_application_is_refused(tmp_path: Path, other: Manifest) -> None:
    ManifestFile(str(tmp_path)).claim(FRESH)
    before = content(tmp_path)
    with pytest.raises(ManifestError, match=r"give each a weights\.folder of its own"):
        ManifestFile(str(tmp_path)).claim(other)
    assert content(tmp_path) == before
