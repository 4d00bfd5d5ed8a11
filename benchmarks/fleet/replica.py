"""A replica as the engine's scheduler works: generating requests first, prompts in chunks, blocks by name, in order.

Time is what `Scale` says of steps. Steps that only generate are run in one go until something changes.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from math import ceil
from typing import Any

from benchmarks.fleet.traffic import PAGE_SIZE, Scale, Turn

MIN_CHUNK = 32
"""As in engine.scheduler."""


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica. left: tokens of the prompt, and of what was generated before, still to compute."""

    turn: Turn
    arrival: float
    hint: int
    left: int = 0
    to_generate: int = 0
    generated: int = 0
    """At the clock of `started`, while it generates."""
    started: int = -1
    private: int = 0
    held: int = 0
    """Leading blocks by name that it holds."""
    state: str = "waiting"


class Replica:
    """One replica. `advance` ends the steps in progress; `busy_until` is when that is due."""

    def __init__(self, number: int, scale: Scale) -> None:
        self.number = number
        self.scale = scale
        self.clear()
        self.busy_s = 0.0
        self.generated = 0

    def clear(self) -> None:
        """Forgets everything, as a new process."""
        self.jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._finishing: list[tuple[int, int, Job]] = []
        self._num_decoding = 0
        self._clock = 0
        self._held: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._step: tuple[float, float, int, list[tuple[Job, int]]] | None = None
        self.busy_until = float("inf")
        self.has_new_names = False
        self.on_name: Any = None
        """Called with a name and whether it is known now; for the oracle."""

    def add(self, turn: Turn, hint: int, now: float, generated: int = 0) -> None:
        """Takes a request in, `generated` so far elsewhere; the steps in progress end with the present one."""
        left, to_generate = turn.prompt_tokens + generated, turn.answer_tokens - generated
        job = Job(turn, turn.arrival, hint, left=left, to_generate=to_generate, generated=generated)
        self.jobs[turn.number] = job
        place = len(self._waiting)
        while place and self._waiting[place - 1].arrival > job.arrival:
            place -= 1
        self._waiting.insert(place, job)
        if self._step is None:
            self._begin(now)
            return
        start, step_s, num, chunks = self._step
        if num > 1:
            done = min(num, max(1, ceil((now - start) / step_s - 1e-9)))
            self._step = (start, step_s, done, chunks)
            self.busy_until = start + done * step_s

    def advance(self, now: float) -> tuple[list[Turn], list[Turn]]:
        """Ends the steps in progress and begins the next; gives who has a first token now, and who has ended."""
        assert self._step is not None
        _, step_s, num, chunks = self._step
        self.busy_s += num * step_s
        self.generated += num * self._num_decoding
        self._clock += num
        self._private += num * self._num_decoding
        ended, first = [], []
        while self._finishing and self._finishing[0][0] <= self._clock:
            _, _, job = heapq.heappop(self._finishing)
            if job.state == "decoding" and job.started + job.to_generate <= self._clock:
                self._num_decoding -= 1
                self._end(job)
                ended.append(job.turn)
        for job, chunk in chunks:
            if job.state != "prefilling":
                continue
            job.left -= chunk
            self._publish(job, job.turn.prompt_tokens + job.generated - job.left)
            if job.left == 0:
                self._prefilling.remove(job)
                self.generated += 1
                job.generated += 1
                job.to_generate -= 1
                job.private += 1
                self._private += 1
                if job.turn.first_token_at < 0:
                    job.turn.first_token_at = now
                    first.append(job.turn)
                if job.to_generate <= 0:
                    self._end(job)
                    ended.append(job.turn)
                else:
                    self._decode(job)
        self._begin(now)
        return first, ended

    def stats(self, now: float) -> dict[str, float]:
        """Gives what the replica reports, as `FleetTable.report` takes it, but for the prefixes."""
        clock = self._clock_at(now)
        decode = 0.0
        for job in self.jobs.values():
            generated = job.generated + (clock - job.started if job.state == "decoding" else 0)
            # Who has gone beyond what was expected goes on for a while, as tails are.
            decode += max(job.hint - generated, 0.1 * generated, 1.0)
        scale = self.scale
        num_running = self._num_decoding + len(self._prefilling)
        prefill = self.queued_tokens()
        return {
            "prefill_tokens": float(prefill),
            "decode_tokens": decode,
            "num_running": num_running,
            "num_waiting": len(self._waiting),
            "max_running": scale.max_running,
            "free_tokens": max(0.0, self._room() - (clock - self._clock) * self._num_decoding),
            "total_tokens": scale.kv_tokens,
            "step_s": scale.step_s,
            "request_s": scale.request_s,
            "token_s": scale.token_s,
            "step_tokens": scale.step_tokens,
            "reported_at": now,
        }

    def queued_tokens(self) -> int:
        """Gives the prompt tokens still to compute, as the engine counts them: of waiting ones without their hits."""
        return sum(job.left for job in self._prefilling) + sum(job.left for job in self._waiting)

    @property
    def num_requests(self) -> int:
        return len(self.jobs)

    def newest_names(self, limit: int) -> list[int]:
        """Gives the names of blocks that are held or cached, the latest used first."""
        names = list(self._held)[-limit:]
        for name in reversed(self._cached):
            if len(names) >= limit:
                break
            names.append(name)
        return names

    def hit_blocks(self, turn: Turn) -> int:
        """Gives how many leading blocks of a prompt are known; never all of its tokens."""
        found = 0
        for name in turn.names[: (turn.prompt_tokens - 1) // PAGE_SIZE]:
            if name not in self._held and name not in self._cached:
                break
            found += 1
        return found

    def crash(self) -> list[tuple[Turn, int]]:
        """Loses everything; gives the requests that were there and how many tokens each had generated."""
        lost = [
            (job.turn, job.generated + (self._clock - job.started if job.state == "decoding" else 0))
            for job in self.jobs.values()
        ]
        self.clear()
        return lost

    # Planning

    def _begin(self, now: float) -> None:
        """Plans the next steps; none where there is nothing to do."""
        self._make_room()
        budget = max(self.scale.step_tokens - self._num_decoding, MIN_CHUNK)
        chunks: list[tuple[Job, int]] = []
        for job in self._prefilling:
            chunk = min(budget, job.left, self._room() - self._num_decoding)
            if chunk <= 0:
                break
            self._take(job, chunk)
            chunks.append((job, chunk))
            budget -= chunk
        while budget > 0 and self._waiting and self._num_running < self.scale.max_running:
            job = self._waiting[0]
            if not self._admit(job, budget):
                break
            self._waiting.popleft()
            chunk = min(budget, job.left)
            self._take(job, chunk)
            chunks.append((job, chunk))
            budget -= chunk
        if not chunks and not self._num_decoding:
            assert not self._num_running
            self._step = None
            self.busy_until = float("inf")
            return
        tokens = sum(chunk for _, chunk in chunks)
        step_s = self.scale.step_s + self.scale.request_s * self._num_decoding + self.scale.token_s * tokens
        num = 1
        if not chunks and self._num_decoding:
            num = max(1, self._finishing[0][0] - self._clock)
            num = max(1, min(num, self._room() // self._num_decoding))
        self._step = (now, step_s, num, chunks)
        self.busy_until = now + num * step_s

    @property
    def _num_running(self) -> int:
        return self._num_decoding + len(self._prefilling)

    def _admit(self, job: Job, budget: int) -> bool:
        turn = job.turn
        num_prompt = turn.prompt_tokens + job.generated
        names = turn.names[: (num_prompt - 1) // PAGE_SIZE]
        hit, revived = 0, 0
        for name in names:
            if name in self._held:
                hit += 1
            elif name in self._cached:
                hit += 1
                revived += 1
            else:
                break
        need = revived * PAGE_SIZE + min(budget, num_prompt - hit * PAGE_SIZE)
        reserve = self.scale.safety_margin * self.scale.kv_tokens if self._num_running else 0
        if need + reserve > self._room():
            return False
        for name in names[:hit]:
            self._hold(name)
        job.held = hit
        job.left = num_prompt - hit * PAGE_SIZE
        if job.turn.hit_tokens == 0 and job.generated == 0:
            job.turn.hit_tokens = hit * PAGE_SIZE
        job.state = "prefilling"
        self._prefilling.append(job)
        return True

    def _decode(self, job: Job) -> None:
        job.state = "decoding"
        job.started = self._clock
        self._num_decoding += 1
        heapq.heappush(self._finishing, (self._clock + job.to_generate, job.turn.number, job))

    def _make_room(self) -> None:
        """Sends the latest back to the line while the next step has no room."""
        while self._num_decoding + MIN_CHUNK * bool(self._prefilling) > self._room() and self._num_running > 1:
            running = [job for job in self.jobs.values() if job.state != "waiting"]
            victim = max(running, key=lambda job: job.arrival)
            if victim.state == "decoding":
                done = self._clock - victim.started
                victim.generated += done
                victim.to_generate -= done
                victim.private += done
                self._num_decoding -= 1
                self._finishing = [entry for entry in self._finishing if entry[2] is not victim]
                heapq.heapify(self._finishing)
            else:
                self._prefilling.remove(victim)
            self._release(victim)
            victim.state = "waiting"
            victim.left = victim.turn.prompt_tokens + victim.generated
            place = 0
            while place < len(self._waiting) and self._waiting[place].arrival < victim.arrival:
                place += 1
            self._waiting.insert(place, victim)

    # Blocks

    def _room(self) -> int:
        """Tokens that can be taken: all but those that requests hold, since cached blocks make room."""
        return self.scale.kv_tokens - self._private - PAGE_SIZE * len(self._held)

    def _take(self, job: Job, num_tokens: int) -> None:
        job.private += num_tokens
        self._private += num_tokens
        self._evict()

    def _evict(self) -> None:
        room = self._room() // PAGE_SIZE
        while len(self._cached) > max(room, 0):
            name, _ = self._cached.popitem(last=False)
            self.has_new_names = True
            if self.on_name:
                self.on_name(self.number, name, False)

    def _hold(self, name: int) -> None:
        if name in self._held:
            self._held[name] += 1
            return
        if name in self._cached:
            del self._cached[name]
        elif self.on_name:
            self.on_name(self.number, name, True)
        self._held[name] = 1
        self.has_new_names = True

    def _publish(self, job: Job, num_computed: int) -> None:
        """Names the full blocks that were computed, from private tokens."""
        full = num_computed // PAGE_SIZE
        for name in job.turn.names[job.held : full]:
            self._hold(name)
            job.private -= PAGE_SIZE
            self._private -= PAGE_SIZE
        job.held = max(job.held, full)

    def _end(self, job: Job) -> None:
        job.private += self._clock - job.started if job.state == "decoding" else 0
        self._publish(job, job.turn.prompt_tokens + job.turn.answer_tokens)
        self._release(job)
        job.state = "ended"
        del self.jobs[job.turn.number]

    def _release(self, job: Job) -> None:
        self._private -= job.private
        job.private = 0
        for name in reversed(job.turn.names[: job.held]):
            self._held[name] -= 1
            if self._held[name] == 0:
                del self._held[name]
                self._cached[name] = None
                self._cached.move_to_end(name)
        job.held = 0
        self._evict()

    def _clock_at(self, now: float) -> int:
        if self._step is None:
            return self._clock
        start, step_s, num, _ = self._step
        return self._clock + min(num, int((now - start) / step_s))

    def check(self) -> None:
        """Asserts that the tokens add up; for tests."""
        running = [job for job in self.jobs.values() if job.state != "waiting"]
        assert len(running) == self._num_running
        grown = sum(self._clock - job.started for job in running if job.state == "decoding")
        assert self._private == sum(job.private for job in running) + grown
        held: dict[int, int] = {}
        for job in running:
            for name in job.turn.names[: job.held]:
                held[name] = held.get(name, 0) + 1
        assert held == self._held
        assert not self._held.keys() & self._cached.keys()
        assert self._room() >= -PAGE_SIZE * self.scale.max_running
