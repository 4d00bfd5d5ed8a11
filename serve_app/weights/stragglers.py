"""Replicas that stay behind the committed version: for how long, and which of them have to be replaced."""

import asyncio

from serve_app.weights.replica_reports import ReplicaReports


class Stragglers:
    """Remembers since when each replica is behind. One event loop only, and its clock."""

    def __init__(self, reports: ReplicaReports, *, converge_timeout_s: float) -> None:
        self._reports = reports
        self._converge_timeout_s = converge_timeout_s
        self._since: dict[str, float] = {}

    def expect(self, names: list[str]) -> None:
        """Begins to wait for replicas that have not confirmed a commit, though they may be silent."""
        for name in names:
            self._since.setdefault(name, _clock())

    @property
    def behind_s(self) -> float:
        """For how long some replica has been behind."""
        return _clock() - min(self._since.values()) if self._since else 0.0

    def look(self, committed_version: int) -> bool:
        """Takes in who is behind; gives whether some replica serves the committed version."""
        is_served = False
        for report in self._reports.listed(committed_version):
            if report.version >= committed_version:
                is_served = True
                self._since.pop(report.replica_id, None)
            else:
                self._since.setdefault(report.replica_id, _clock())
        return is_served

    def overdue(self, committed_version: int) -> list[str]:
        """Gives, once each, the replicas that had their time, where another one shows that the version can be served.

        Without that they are left alone: their replacements could not start either.
        """
        if not self.look(committed_version):
            return []
        late = [name for name, since in self._since.items() if _clock() - since > self._converge_timeout_s]
        for name in late:
            del self._since[name]
        return late


def _clock() -> float:
    return asyncio.get_running_loop().time()
