"""What replicas report, as arrays with a row for each, which `score` reads."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from serve_app.routing.prefix_map import ToldPrefixes
from serve_app.routing.score import Bools, Floats, Ints, Replicas
from serve_app.routing.sent_work import Unseen

MAX_AGE_S = 5.0
"""A report is not taken to be older: one that has not changed for long is of an idle replica, or of one that hangs."""
REPORT_MARGIN_S = 0.05
"""Work sent this long before a report may not be in it yet; counting it twice for a moment does no harm."""
FIRST_SIZE = 8
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, and without a pattern in its bits: so that two hashes mix into a third."""
MOST = 1e15
"""Of any number in a report: one that is larger, or none, would make prices that compare with nothing."""
UNKNOWN = {
    "max_running": 1024.0,
    "total_tokens": 1e6,
    "step_s": 0.02,
    "request_s": 0.0005,
    "token_s": 0.0005,
    "step_tokens": 2048.0,
}
"""While no replica has told them; equal for all, so only the order of sizes matters."""
TIMES = ("step_s", "request_s", "token_s")
ALIKE = 1.3
"""Times of a step that differ by less are the same: a replica measures while others compute beside it, and one that was
lucky would draw all the requests of a quiet fleet."""
COLUMNS = ("prefill_tokens", "decode_tokens", "num_running", "num_waiting", "free_tokens", *UNKNOWN)
NUM_PLAIN = len(COLUMNS) - len(UNKNOWN)
BLANK = np.array([UNKNOWN.get(column, 0.0) for column in COLUMNS])
"""A row of nobody: closed, so any numbers do of which nothing is divided by zero."""


class FleetTable:
    """The latest report of each replica. One thread only; rows of replicas that are gone are used again."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.prefixes = ToldPrefixes()
        self.reported_at = np.full(FIRST_SIZE, -np.inf)
        self.versions: Ints = np.zeros(FIRST_SIZE, dtype=np.int64)
        self.names: list[str | None] = [None] * FIRST_SIZE
        self._hashes = np.zeros(FIRST_SIZE, dtype=np.uint64)
        self._is_open: Bools = np.zeros(FIRST_SIZE, dtype=np.bool_)
        self._values: Floats = np.repeat(BLANK[:, None], FIRST_SIZE, axis=1)
        self._untold: set[int] = set()
        """Rows of replicas that have not told all there is to know yet."""
        self._known: Floats | None = None
        """What the reports say, completed and smoothed; None after a change."""

    def __len__(self) -> int:
        """Rows, those of nobody included."""
        return len(self.names)

    def row_of(self, name: str) -> int:
        """Gives the row of a replica, a new one where it is not known yet: open, and without work."""
        row = self.rows.get(name)
        if row is None:
            if None not in self.names:
                self._grow()
            row = self.rows[name] = self.names.index(None)
            self.names[row] = name
            self._hashes[row] = _hash(name)
            self._is_open[row] = True
            self._values[:, row] = 0.0
            self._untold.add(row)
            self._known = None
        return row

    def report(self, name: str, stats: Mapping[str, Any]) -> None:
        """Takes in the report of a replica; what it leaves out counts as unknown.

        prefill_tokens, decode_tokens, num_running, num_waiting, max_running, free_tokens, total_tokens, step_s,
        request_s, token_s, step_tokens: as in `Replicas`. weight_version, is_fenced. prefixes: `pack_names` of what it
        has cached. reported_at: seconds since the epoch. Nonsense raises, and changes nothing but the order of raising.
        """
        values = [float(stats.get(column, 0.0)) for column in COLUMNS]
        reported_at, version = float(stats.get("reported_at", 0.0)), int(stats.get("weight_version", 0))
        page_size = int(stats.get("page_size", 0))
        if not all(0.0 <= value <= MOST for value in (*values, reported_at, version, page_size)):
            numbers = dict(zip(COLUMNS, values, strict=True))
            raise ValueError(f"{name} reports {numbers} at {reported_at}; every number has to be from 0 to {MOST:g}")
        is_open, prefixes = not stats.get("is_fenced", False), bytes(stats.get("prefixes", b""))
        row = self.row_of(name)
        self._values[:, row] = values
        self._known = None
        if min(values[NUM_PLAIN:]) > 0:
            self._untold.discard(row)
        else:
            self._untold.add(row)
        self.reported_at[row], self.versions[row], self._is_open[row] = reported_at, version, is_open
        self.prefixes.tell(row, prefixes)

    def forget(self, name: str) -> None:
        """Forgets a replica that is gone."""
        row = self.rows.pop(name, None)
        if row is None:
            return
        self.names[row] = None
        self._is_open[row] = False
        self.reported_at[row] = -np.inf
        self._values[:, row] = BLANK
        self._known = None
        self._untold.discard(row)
        self.prefixes.forget(row)

    def num_requests(self) -> Floats:
        """Gives how many requests each replica had when it reported."""
        running, waiting = self._values[COLUMNS.index("num_running")], self._values[COLUMNS.index("num_waiting")]
        total: Floats = running + waiting
        return total

    def replicas(
        self, unseen: Unseen, others: Floats | None = None, *, mean_work: tuple[float, float] = (0.0, 0.0), now: float
    ) -> Replicas:
        """Gives what is known now: the reports, and what was sent since.

        unseen: by the caller. others: requests of which it only knows that others must have sent them; they are taken
        to be of mean_work, prompt and answer tokens. The arrays are good until the next report.
        """
        if self._known is None:
            self._known = self._evened(self._filled())
        columns = dict(zip(COLUMNS, self._known, strict=True))
        age_s = np.clip(now - self.reported_at, 0.0, MAX_AGE_S)
        sent_age_s = np.clip(now - unseen.since, 0.0, MAX_AGE_S)
        prefill, decode, num_new = unseen.prefill_tokens, unseen.decode_tokens, unseen.num_requests
        if others is not None:
            prefill, decode = prefill + others * mean_work[0], decode + others * mean_work[1]
            num_new = num_new + others
            # Of these only the count is known; they came in between, so half of the age.
            sent_age_s = np.where(others > 0, np.maximum(sent_age_s, age_s / 2), sent_age_s)
        columns["free_tokens"] = np.maximum(columns["free_tokens"] - prefill - decode, 0.0)
        there = columns["num_running"] + num_new
        columns["num_running"] = np.minimum(there, np.maximum(columns["max_running"], columns["num_running"]))
        columns["num_waiting"] = columns["num_waiting"] + there - columns["num_running"]
        return Replicas(
            sent_prefill_tokens=prefill,
            sent_decode_tokens=decode,
            age_s=age_s,
            sent_age_s=sent_age_s,
            is_open=self._is_open,
            **columns,
        )

    def home_of(self, key: str, is_open: Bools) -> int | None:
        """Gives the open replica where a key belongs, the same one at every router; most keep theirs as others come.

        Rendezvous hashing (Thaler and Ravishankar 1998): the replica whose hash with the key is the greatest.
        """
        rows = np.flatnonzero(is_open)
        if not len(rows):
            return None
        mixed = (self._hashes[rows] ^ np.uint64(_hash(key))) * MIXER
        return int(rows[np.argmax(mixed ^ (mixed >> np.uint64(32)))])

    def named(self, rows: Sequence[int] | Ints) -> list[str]:
        """Gives the replicas in these rows."""
        return [name for row in rows if (name := self.names[row]) is not None]

    def _evened(self, values: Floats) -> Floats:
        """Gives the columns with the times of a step that are alike made equal, to the fleet's median."""
        rows = np.flatnonzero([name is not None for name in self.names])
        if len(rows) > 1:
            times = np.array([COLUMNS.index(column) for column in TIMES])[:, None]
            measured = values[times, rows]
            usual = np.median(measured, axis=1, keepdims=True)
            is_alike = (measured < ALIKE * usual) & (measured * ALIKE > usual)
            values[times, rows] = np.where(is_alike, usual, measured)
        return values

    def _filled(self) -> Floats:
        """Gives a copy of all columns, those of `UNKNOWN` so that who has not told is as the least of others."""
        filled = self._values.copy()
        if not self._untold:
            return filled
        is_named = np.array([name is not None for name in self.names])
        for index, column in enumerate(COLUMNS):
            if column in UNKNOWN:
                is_known = self._values[index] > 0
                known = self._values[index][is_known & is_named]
                filled[index][~is_known] = known.min() if len(known) else UNKNOWN[column]
        # Who has told nothing of its size has room; no room at all is told as 0 beside a size.
        no_size = self._values[COLUMNS.index("total_tokens")] == 0
        filled[COLUMNS.index("free_tokens")][no_size] = filled[COLUMNS.index("total_tokens")][no_size]
        return filled

    def _grow(self) -> None:
        size = len(self.names)
        self.names += [None] * size
        self._hashes = np.append(self._hashes, np.zeros(size, dtype=np.uint64))
        self.reported_at = np.append(self.reported_at, np.full(size, -np.inf))
        self.versions = np.append(self.versions, np.zeros(size, dtype=np.int64))
        self._is_open = np.append(self._is_open, np.zeros(size, dtype=np.bool_))
        self._values = np.append(self._values, np.repeat(BLANK[:, None], size, axis=1), axis=1)
        self._known = None


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
