"""Which versions were committed: in memory, and in the manifest of a folder where one is configured."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from engine import SwapConflict
from serve_app.messages import CommittedVersion, CommittedWeights, ReplicaReport, StagedDetails, SwapResult
from serve_app.protocol.errors import ManifestError, VersionUnavailable
from serve_app.weights.manifest import Manifest, ManifestFile
from serve_app.weights.records import WeightRecords

logger = logging.getLogger("ray.serve.pitstop")

FIRST_VERSION = 1
"""Of the model the application was started with."""


class WeightHistory:
    """The committed version and those before it. One event loop only.

    Invariants: a number is never given twice, whatever became of its swap; `committed` is what the manifest says,
    except after `adopt`, which follows the replicas even where the disk does not.
    """

    def __init__(self, *, application: str, model: str, folder: str | None, num_earlier: int, layout: str = "") -> None:
        """Opens the history; blocks while the manifest is read. Raises ManifestError where it cannot be trusted.

        layout: how replicas hold the weights; digests made under another one cannot be compared.
        """
        # Cast, as the checkpoint may be of another dtype than the one it is loaded in.
        fresh = Manifest(application, model, (CommittedVersion(FIRST_VERSION, cast=True),), FIRST_VERSION)
        self._file = None if folder is None else ManifestFile(folder)
        self._manifest = fresh if self._file is None else self._file.claim(fresh)
        self._before = self._manifest.versions
        self._last_version = self._manifest.last_version
        self._num_earlier = num_earlier
        self._layout = layout
        self._details = WeightRecords(folder)
        self._changing = asyncio.Lock()

    @property
    def line(self) -> str:
        """What tells the controllers of this manifest from all others; empty where there is no manifest."""
        return self._manifest.line

    @property
    def newest(self) -> CommittedVersion:
        """The committed version."""
        return self._manifest.versions[-1]

    @property
    def previous(self) -> CommittedVersion:
        """The version that was committed before that one."""
        return self._manifest.versions[-2]

    @property
    def committed(self) -> CommittedWeights:
        """The committed version, as replicas are told it."""
        newest = self.newest
        return CommittedWeights(
            newest.version, newest.source, newest.cast, newest.swap_id, digest=self.digest_of(newest)
        )

    @property
    def next_version(self) -> int:
        return self._last_version + 1

    def listed(self) -> list[CommittedVersion]:
        """Gives all remembered versions, newest first."""
        return list(reversed(self._manifest.versions))

    def digest_of(self, version: CommittedVersion) -> str | None:
        """Gives what the weights of a version have to be, where that can be compared."""
        return version.digest if version.digest and version.layout == self._layout else None

    def find_key(self, key: str | None) -> CommittedVersion | None:
        """Gives the version that a request with this idempotency key has brought."""
        if key is None:
            return None
        return next((one for one in self._manifest.versions if one.idempotency_key == key), None)

    def rollback_target(self, version: int | None) -> CommittedVersion:
        """Gives an earlier version; raises VersionUnavailable.

        By default the one before the committed, leaving out those that have failed and those of the same weights: a
        rolling swap that failed and went back has left both.
        """
        earlier = self._manifest.versions[:-1]
        if not earlier:
            raise VersionUnavailable(f"version {self.newest.version} is the only one there is; nothing is before it")
        if version is None:
            return self._default_target(earlier)
        if version == self.newest.version:
            raise VersionUnavailable(f"version {version} is the committed one already")
        for one in earlier:
            if one.version == version:
                return one
        known = ", ".join(str(one.version) for one in earlier)
        raise VersionUnavailable(f"version {version} is not in the history; it holds {known}")

    def _default_target(self, earlier: Sequence[CommittedVersion]) -> CommittedVersion:
        served = self._origin(self.newest)
        for one in reversed(earlier):
            if not one.has_failed and self._origin(one) != served:
                return one
        raise VersionUnavailable(
            f"all before version {self.newest.version} have failed or are of the same weights; name the version"
        )

    def _origin(self, version: CommittedVersion) -> int:
        """Gives the version that first had the weights of this one."""
        known = {one.version: one.rollback_to for one in self._manifest.versions}
        origin, target = version.version, version.rollback_to
        while target is not None:
            origin, target = target, known.get(target)
        return origin

    async def check_writable(self) -> None:
        """Raises ManifestError where it is plain that a commit could not be written."""
        if self._file is not None:
            await asyncio.to_thread(self._file.check_term)

    async def keep_details(self, version: CommittedVersion, details: StagedDetails) -> CommittedVersion:
        """Gives the version with what vouches for its details, which are durable then. Raises ManifestError."""
        sha256 = await asyncio.to_thread(self._details.write, version.version, details)
        return replace(version, record_sha256=sha256, layout=self._layout)

    async def details(self, version: int) -> StagedDetails | None:
        """Gives what is known of each tensor of a version, where that is intact."""
        known = next((one for one in self._manifest.versions if one.version == version), None)
        if known is None or not known.record_sha256:
            return None
        return await asyncio.to_thread(self._details.read, version, known.record_sha256)

    async def result_of(self, version: CommittedVersion) -> SwapResult:
        """Gives what became of the swap that brought a version."""
        # Only the model the application was started with came without a swap.
        assert version.result is not None
        details = await self.details(version.version)
        return replace(version.result, unchanged=details.unchanged if details is not None else [])

    async def commit(self, version: CommittedVersion) -> None:
        """Makes this the committed version: once it returns, so does every restart. Raises ManifestError."""
        async with self._changing:
            if version.version <= self.newest.version:
                raise SwapConflict(f"version {self.newest.version} was committed meanwhile; swap again")
            # Spent even if the write fails: nobody can tell what a disk that failed shows after a crash.
            self._last_version = max(self._last_version, version.version)
            before = self._manifest.versions
            # The tensors that a partial swap leaves may be thousands; they are with the details.
            await self._write(self._trimmed((*before, _lean(version))))
            self._before = before
        await asyncio.to_thread(self._details.keep_only, {one.version for one in (*self._manifest.versions, *before)})

    async def take_back(self, version: int) -> None:
        """Makes the version before this latest commit the committed one again; its number stays spent."""
        async with self._changing:
            if self.newest.version == version:
                await self._write(self._before)

    async def note_failed(self, version: int) -> None:
        """Marks a version whose swap has failed, and frees its idempotency key: a repeated request is carried out."""
        async with self._changing:
            await self._write_if_possible(
                tuple(
                    replace(one, idempotency_key=None, has_failed=True) if one.version == version else one
                    for one in self._manifest.versions
                )
            )

    async def keep_result(self, result: SwapResult) -> None:
        """Keeps what became of a swap; a disk that fails now loses only this."""
        async with self._changing:
            versions = self._manifest.versions
            kept = tuple(
                _lean(replace(one, result=result)) if one.version == result.version else one for one in versions
            )
            await self._write_if_possible(kept)

    async def adopt(self, report: ReplicaReport) -> None:
        """Follows a replica that serves a newer version than is known here, as versions only grow."""
        async with self._changing:
            if report.version <= self.newest.version:
                return
            logger.warning("event=version_recovered version=%d replica=%s", report.version, report.replica_id)
            adopted = CommittedVersion(
                report.version,
                report.source,
                cast=report.cast,
                label="learnt from a replica",
                committed_at=now(),
                requested_by=f"replica {report.replica_id}",
                swap_id=report.swap_id,
            )
            self._last_version = max(self._last_version, report.version)
            await self._write_if_possible(self._trimmed((*self._manifest.versions, adopted)))

    def _trimmed(self, versions: Sequence[CommittedVersion]) -> tuple[CommittedVersion, ...]:
        """Forgets the oldest, but never the model the application was started with: it is always there to go back."""
        configured = [one for one in versions if one.version == FIRST_VERSION]
        return (*configured, *[one for one in versions if one.version != FIRST_VERSION][-1 - self._num_earlier :])

    async def _write(self, versions: tuple[CommittedVersion, ...]) -> None:
        following = replace(self._manifest, versions=versions, last_version=self._last_version)
        if self._file is not None:
            await asyncio.to_thread(self._file.write, following)
        self._manifest = following

    async def _write_if_possible(self, versions: tuple[CommittedVersion, ...]) -> None:
        """Changes memory in any case: what the replicas do is a fact, whatever the disk says."""
        try:
            await self._write(versions)
        except ManifestError as error:
            logger.warning("event=manifest_behind version=%d error=%r", versions[-1].version, str(error))
            self._manifest = replace(self._manifest, versions=versions, last_version=self._last_version)


def _lean(version: CommittedVersion) -> CommittedVersion:
    return version if version.result is None else replace(version, result=replace(version.result, unchanged=[]))


def now() -> str:
    """Gives the time as the history shows it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
