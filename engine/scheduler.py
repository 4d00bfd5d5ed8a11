"""What the next step computes (`plan`), and what its tokens mean (`commit`). No tensors, no clock of its own.

Running requests go on first, decoding ones before prompts; then the waiting line gives its head as long as there is
room. When blocks run out, the lowest ranking request goes back to the line; its full blocks stay findable.

A step may be planned while the one before it is in flight. A request then goes on from a token that has no name yet,
and sits the step out where that does not do: when its last token is on its way, when its processors or its constraint
have to see the token, when children are about to fork from it. Nobody gives way meanwhile: a request that lacks blocks
sets `must_drain`, and the next plan is made when nothing is in flight. Blocks of a request that ended with a row in
flight are free when that row is committed.

Before a swap of the weights requests that have not begun may be held back while those that have begun finish.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf

from engine.active_request import ActiveRequest
from engine.block_groups import BlockGroup, drain_copies, find_prefix, visible_digests
from engine.block_pool import BlockPool, block_digest, root_digest
from engine.config import ResolvedConfig
from engine.metrics import EngineStats
from engine.plan import PlannedRow, SampledToken, StepPlan
from engine.prefix_index import PrefixIndex
from engine.request import FinishReason, RequestStatus, WeightSpan
from engine.waiting_line import Order, WaitingLine

MIN_PREFILL_TOKENS = 32
"""A step full of decoding requests still takes so many prompt tokens, or prompts would starve."""
MIN_SCORED_TOKENS = 32
"""So many tokens of prompts are scored in a step even where every place is taken by a request that samples."""
MAX_PREFILL_STEPS = 8
"""With prefill_first, decoding requests wait for so many steps at most."""
STAND_IN = 0
"""In the place of a token without a name; an id that every vocabulary has."""

LINE_ORDERS: dict[str, Order] = {"fifo": "arrival", "prefill_first": "arrival", "priority": "priority", "fair": "fair"}
STATUS_OF = {
    FinishReason.STOP: RequestStatus.FINISHED,
    FinishReason.LENGTH: RequestStatus.FINISHED,
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.FAILED: RequestStatus.FAILED,
    FinishReason.WEIGHT_VERSION_GONE: RequestStatus.CANCELLED,
}


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    ended: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})


class Scheduler:
    """Owns every active request and the block pools.

    Invariants: every request waits in line, is held back, runs, or is the child of one whose prompt is not computed
    yet; only running ones hold blocks, and ended ones that have a row in flight.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.groups = [
            BlockGroup(BlockPool(size, num_host_slots=config.num_host_slots), window=window, page_size=config.page_size)
            for window, size in zip(config.windows, config.pool_sizes, strict=True)
        ]
        self._max_chunk = min((group.max_chunk for group in self.groups), default=config.max_batch_tokens)
        self.counters = Counters()
        self.version = 1
        self._line = WaitingLine(LINE_ORDERS[config.scheduler_type])
        self._running: dict[str, ActiveRequest] = {}
        self._unborn: dict[str, ActiveRequest] = {}
        self._held: dict[str, ActiveRequest] = {}
        self._holds_all = self._holds_pinned = False
        self._ending: set[ActiveRequest] = set()
        self.num_in_flight = 0
        """Steps that were planned and are not committed."""
        self.must_drain = False
        """The last plan left a request without blocks that others can give only while nothing is in flight."""
        self._arrivals = count()
        self._num_prefill_steps = 0
        self._waiting_prefill_tokens = 0
        self._waiting_decode_tokens = 0
        self._score_room = 0

    @property
    def has_requests(self) -> bool:
        """There is something to compute: requests that are held back do not count."""
        return bool(self._line or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._line) + len(self._held)

    def requests(self) -> list[ActiveRequest]:
        """All active requests, oldest first."""
        everyone = [*self._running.values(), *self._waiting(), *self._unborn.values()]
        return sorted(everyone, key=lambda request: request.arrival)

    def add(self, request: ActiveRequest) -> None:
        """Puts a checked request, with its children behind it, in line."""
        assert request.request_id not in self._line
        assert request.request_id not in self._running
        came = request.created_time - request.waited_s
        request.arrival = came, next(self._arrivals)
        self._enter_line(request)
        self.counters.prompt_tokens += len(request.prompt_ids)
        for child in request.children:
            child.arrival = came, next(self._arrivals)
            self._unborn[child.request_id] = child
        if request.num_tokens == 1:
            self._release_children(request)

    def plan(self, max_tokens: int, now: float) -> StepPlan:
        """Chooses the rows of the next step and gives them blocks; there may be none while a step is in flight.

        `max_tokens` is a wish: prompts get MIN_PREFILL_TOKENS even beyond it. `config.max_batch_tokens` is a bound.
        """
        assert self.num_in_flight <= 1, "a token without a name is always of the step before"
        self.must_drain = False
        # A step has about as many rows of logits as it was sized for, however long the prompts to score are.
        self._score_room = max(MIN_SCORED_TOKENS, self.config.max_requests_per_batch - len(self._running))
        rows: dict[str, PlannedRow] = {}
        prompts_first = self.config.scheduler_type == "prefill_first" and self._num_prefill_steps < MAX_PREFILL_STEPS
        if not prompts_first:
            self._plan_decoding(rows)
        budget = max(max_tokens - len(rows), MIN_PREFILL_TOKENS)
        self._plan_prompts(rows, min(budget, self.config.max_batch_tokens - len(rows)), now)
        has_prompts = bool(rows)
        if prompts_first:
            self._plan_decoding(rows)
        if not rows:
            return StepPlan([])
        if prompts_first and has_prompts:
            self._num_prefill_steps += 1
        elif not self.must_drain:
            self._num_prefill_steps = 0
        for row in rows.values():
            _set_off(row)
        self.num_in_flight += 1
        return StepPlan(list(rows.values()), drain_copies(self.groups))

    def commit(self, plan: StepPlan, samples: dict[str, SampledToken], now: float) -> list[ActiveRequest]:
        """Takes the outcome of a step in, the oldest in flight; gives the requests that have something new to tell.

        Every row that samples or scores has an entry in `samples`; any other may have one that carries an error.
        Rows of requests that ended meanwhile are thrown away.
        """
        self.num_in_flight -= 1
        told = []
        for row in plan.rows:
            request = row.request
            request.num_in_flight -= 1
            request.num_pending -= row.samples
            if request.status.is_terminal:
                self._release_when_landed(request)
                continue
            sample = samples.get(request.request_id)
            if sample is not None and sample.error is not None:
                # The content of its newest blocks is not to be trusted: end without publishing them.
                self._end(request, FinishReason.FAILED, now, error=sample.error)
                told.append(request)
                continue
            self._line.charge(request, num_prompt=row.num_tokens, num_generated=int(row.samples))
            self._publish_full_blocks(request, row.end)
            for group, table in zip(self.groups, request.block_tables, strict=True):
                group.drop_invisible(table, row.end)
            if request.children and row.end >= len(request.prompt_ids) - 1:
                self._fork(request, now)
            if sample is not None and sample.scores is not None:
                request.prompt_logprobs += sample.scores.logprobs
                request.prompt_top_logprobs += sample.scores.top
            if sample is not None and row.samples:
                self._append(request, sample, now)
                told.append(request)
            elif request.max_new_tokens == 0 and row.end == len(request.prompt_ids):
                # No token of it, and yet these weights have scored the prompt.
                request.spans.append(WeightSpan(self.version, 0, 0))
                self._end(request, FinishReason.LENGTH, now)
                told.append(request)
        return told

    def end(
        self, request_id: str, reason: FinishReason, now: float, *, error: str | None = None
    ) -> ActiveRequest | None:
        """Ends a request before its time (cancelled, failed) and frees its blocks; None when it is not active."""
        request = self._running.get(request_id) or self._line.get(request_id)
        request = request or self._held.get(request_id) or self._unborn.get(request_id)
        if request is not None:
            self._end(request, reason, now, error=error)
        return request

    def hold_back(self, *, everybody: bool, pinned: bool) -> None:
        """Keeps requests that have not begun out of the line from here on, or only those with a pinned version.

        With neither they are back in line, each where its arrival puts it.
        """
        if (everybody, pinned) == (self._holds_all, self._holds_pinned):
            return
        self._holds_all, self._holds_pinned = everybody, pinned
        misplaced = [request for request in self._line if self._is_held_back(request)]
        misplaced += [request for request in self._held.values() if not self._is_held_back(request)]
        for request in misplaced:
            self._leave_line(request)
            self._enter_line(request)

    def has_begun(self, *, only_pinned: bool) -> bool:
        """Gives whether a request has begun and not ended, of all or of those with a pinned version."""
        return any(
            request.is_begun and (not only_pinned or request.pinned_version is not None)
            for requests in (self._running.values(), self._line.unordered())
            for request in requests
        )

    def set_version(self, version: int, *, recompute: bool = False) -> None:
        """Starts a new weight version: no prefix of another version is found or published from here on.

        No step is in flight. Running requests keep their keys and values, or with `recompute` go back to the line and
        compute them anew.
        """
        assert self.num_in_flight == 0, "a step in flight samples from the weights it was launched with"
        self.version = version
        for group in self.groups:
            group.pool.prefixes.clear()
        for request in list(self._running.values()):
            if recompute:
                self._preempt(request)
            else:
                request.chain_version = None

    @property
    def prefixes(self) -> PrefixIndex:
        """The names of cached prefixes; of several kinds of layers, in those that see furthest back."""
        return max(self.groups, key=lambda group: group.window or inf).pool.prefixes if self.groups else PrefixIndex()

    def stats(self) -> EngineStats:
        """The numbers this class knows; the loop adds its own."""
        running = self._running.values()
        pools = [group.pool for group in self.groups]
        return EngineStats(
            num_waiting=self.num_waiting + len(self._unborn),
            num_running=len(self._running),
            max_running=self.config.max_requests_per_batch,
            queued_prefill_tokens=self._waiting_prefill_tokens
            + sum(request.num_to_compute for request in running if request.num_to_compute > 1),
            pending_decode_tokens=self._waiting_decode_tokens + sum(request.num_to_generate for request in running),
            num_blocks=sum(pool.num_blocks for pool in pools),
            num_used_blocks=sum(pool.num_blocks - pool.num_free for pool in pools),
            num_cached_blocks=sum(pool.num_cached for pool in pools),
            num_host_blocks=sum(pool.num_on_host for pool in pools),
            page_size=self.config.page_size,
            weight_version=self.version,
            prompt_tokens_total=self.counters.prompt_tokens,
            cached_tokens_total=self.counters.cached_tokens,
            generated_tokens_total=self.counters.generated_tokens,
            preemptions_total=self.counters.preemptions,
            evicted_blocks_total=sum(pool.num_evicted for pool in pools),
            offloaded_blocks_total=sum(pool.num_sunk for pool in pools),
            restored_blocks_total=sum(pool.num_restored for pool in pools),
            requests_total=dict(self.counters.ended),
        )

    def check_invariants(self) -> None:
        """Asserts what the class promises; for tests."""
        for index, group in enumerate(self.groups):
            group.pool.check_invariants()
            held: dict[int, int] = {}
            for request in [*self._running.values(), *self._ending]:
                table = request.block_tables[index]
                assert len(table) * self.config.page_size >= request.num_computed
                first = group.first_visible(request.num_computed)
                assert all(block >= 0 for block in table[first:])
                for block in table:
                    held[block] = held.get(block, 0) + (block >= 0)
            held.pop(-1, None)
            assert held == {block: n for block, n in enumerate(group.pool._num_holders) if n > 0}
        for request in self._running.values():
            assert 0 <= request.num_computed <= request.num_tokens + request.num_pending
            assert 0 <= request.num_pending <= request.num_in_flight <= self.num_in_flight
            assert len(request.digests) * self.config.page_size <= request.num_tokens
        for request in self._ending:
            assert request.status.is_terminal
            assert 0 < request.num_in_flight <= self.num_in_flight
        for request in [*self._waiting(), *self._unborn.values()]:
            assert not any(request.block_tables)
            assert request.num_computed == request.num_pending == request.num_in_flight == 0
        assert self._waiting_prefill_tokens == sum(request.num_to_compute for request in self._waiting())
        assert self._waiting_decode_tokens == sum(request.num_to_generate for request in self._waiting())
        assert not any(self._is_held_back(request) for request in self._line)
        assert all(self._is_held_back(request) for request in self._held.values())

    # Planning

    def _plan_decoding(self, rows: dict[str, PlannedRow]) -> None:
        room = self.config.max_batch_tokens - sum(row.num_tokens for row in rows.values())
        for request in self._best_first(is_decoding=True):
            if room == 0:
                return
            room -= self._plan_row(request, 1, rows)

    def _plan_prompts(self, rows: dict[str, PlannedRow], budget: int, now: float) -> None:
        for request in self._best_first(is_decoding=False):
            if budget == 0:
                return
            if chunk := self._chunk(request, budget):
                budget -= self._plan_row(request, chunk, rows)
        while budget > 0 and len(self._running) < self.config.max_requests_per_batch and not self.must_drain:
            head = self._line.head()
            if head is None or (head.num_to_score and not self._score_room) or not self._admit(head, budget, now):
                return
            budget -= self._plan_row(head, self._chunk(head, budget), rows)

    def _best_first(self, *, is_decoding: bool) -> Iterator[ActiveRequest]:
        for request in sorted(self._running.values(), key=self._line.rank):
            # A better one may have sent this one back to the line meanwhile.
            if request.request_id not in self._running or _sits_out(request):
                continue
            if (request.num_to_compute == 1) == is_decoding:
                yield request

    def _chunk(self, request: ActiveRequest, budget: int) -> int:
        """How many tokens to compute next; of a prompt with children all but the last, which each samples after."""
        chunk = min(budget, self._max_chunk, request.num_to_compute - bool(request.children))
        if request.num_to_score > self._score_room:
            chunk = min(chunk, max(0, request.num_scored - request.num_computed) + self._score_room)
        return chunk

    def _plan_row(self, request: ActiveRequest, num_new: int, rows: dict[str, PlannedRow]) -> int:
        """Adds a row of `num_new` tokens, sending others back for their blocks where needed; gives its size."""
        start, end = request.num_computed, request.num_computed + num_new
        while not self._has_blocks(request, end):
            if self.num_in_flight > 0:
                self.must_drain = True
                return 0
            victim = max(self._running.values(), key=self._line.rank)
            self._preempt(victim)
            rows.pop(victim.request_id, None)
            if victim is request:
                return 0
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.extend(table, end)
        scored = range(0)
        if request.num_to_score:
            scored = range(max(start, request.num_scored), min(end, len(request.prompt_ids) - 1))
            self._score_room -= len(scored)
        rows[request.request_id] = PlannedRow(
            request=request,
            start=start,
            token_ids=request.token_ids[start:end] or [STAND_IN],
            block_tables=[list(table) for table in request.block_tables],
            samples=end == request.num_tokens + request.num_pending and request.max_new_tokens > 0,
            is_ahead=start == request.num_tokens,
            scored=scored,
        )
        return num_new

    def _has_blocks(self, request: ActiveRequest, end: int) -> bool:
        return all(
            group.num_missing(table, end) <= group.pool.num_free
            for group, table in zip(self.groups, request.block_tables, strict=True)
        )

    def _admit(self, request: ActiveRequest, budget: int, now: float) -> bool:
        """Moves the head of the line to the running ones, with its prefix hit, if blocks are there for it."""
        page = self.config.page_size
        hit = self._find_prefix(request)
        num_cached = len(hit) * page
        end = num_cached + min(budget, self._max_chunk, request.num_tokens - num_cached)
        for group in self.groups:
            visible = visible_digests(group, hit, page)
            num_needed = group.pool.cost(visible) + -(-end // page) - len(hit)
            reserve = int(self.config.safety_margin * group.pool.num_blocks) if self._running else 0
            if num_needed + reserve > group.pool.num_free:
                return False
        self._waiting_prefill_tokens -= request.num_to_compute
        self._waiting_decode_tokens -= request.num_to_generate
        self._line.admit(request)
        request.block_tables = []
        for group in self.groups:
            visible = visible_digests(group, hit, page)
            request.block_tables.append([-1] * (len(hit) - len(visible)) + group.pool.take(visible))
        request.digests = request.digests[: len(hit)]
        request.num_computed = num_cached
        request.chain_version = self.version
        self._start_running(request, now)
        if request.children and request.num_to_compute == 1:
            self._fork(request, now)
        return True

    def _start_running(self, request: ActiveRequest, now: float) -> None:
        self._running[request.request_id] = request
        request.is_begun = True
        request.status = RequestStatus.PREFILLING
        if request.num_cached_tokens is None:
            # Of a resumed request the cache may have tokens of the output too.
            request.num_cached_tokens = min(request.num_computed, len(request.prompt_ids))
            request.first_scheduled_time = now
            self.counters.cached_tokens += request.num_cached_tokens

    def _find_prefix(self, request: ActiveRequest) -> list[bytes]:
        """Gives the names of the known leading blocks; never all tokens, since one has to be left to sample after."""
        if not self.config.allow_block_sharing:
            return []
        page = self.config.page_size
        num_full = (request.num_tokens - 1) // page
        if request.num_to_score:
            # What the cache has is not computed, and has no logits to score.
            num_full = min(num_full, request.num_scored // page)
        if request.chain_version != self.version:
            request.digests = []
            request.chain_version = self.version
        self._extend_digests(request, num_full)
        digests = request.digests[:num_full]
        return digests[: find_prefix(self.groups, digests, page)]

    # Outcome

    def _publish_full_blocks(self, request: ActiveRequest, end: int) -> None:
        if request.chain_version is None or not self.config.allow_block_sharing:
            return
        first = len(request.digests)
        self._extend_digests(request, end // self.config.page_size)
        for index in range(first, len(request.digests)):
            for group, table in zip(self.groups, request.block_tables, strict=True):
                if table[index] >= 0:
                    group.pool.publish(table[index], request.digests[index], depth=index)

    def _extend_digests(self, request: ActiveRequest, num_full: int) -> None:
        page = self.config.page_size
        for index in range(len(request.digests), num_full):
            parent = request.digests[-1] if request.digests else root_digest(self.version, request.cache_salt)
            request.digests.append(block_digest(parent, request.token_ids[index * page : (index + 1) * page]))

    def _fork(self, parent: ActiveRequest, now: float) -> None:
        """Lets the children of a computed prompt run on its blocks; those that find no room join the line instead."""
        page, computed = self.config.page_size, parent.num_computed
        waiting = []
        for child in parent.children:
            has_room = len(self._running) < self.config.max_requests_per_batch
            if computed % page and not all(group.pool.num_free for group in self.groups):
                has_room = False
            if not has_room or parent.chain_version is None or self._unborn.pop(child.request_id, None) is None:
                waiting.append(child)
                continue
            for group, table in zip(self.groups, parent.block_tables, strict=True):
                shared = group.share(table, computed // page)
                child.block_tables.append(
                    shared + ([group.pool.fork(table[computed // page])] if computed % page else [])
                )
            child.num_computed = computed
            child.digests = list(parent.digests)
            child.chain_version = parent.chain_version
            self._start_running(child, now)
        parent.children = waiting
        self._release_children(parent)

    def _release_children(self, parent: ActiveRequest) -> None:
        """Puts children that cannot share blocks (any more) in line as requests of their own."""
        for child in parent.children:
            if self._unborn.pop(child.request_id, None) is not None:
                child.is_begun = parent.is_begun
                self._enter_line(child)
        parent.children = []

    def _append(self, request: ActiveRequest, sample: SampledToken, now: float) -> None:
        request.status = RequestStatus.DECODING
        request.append(sample.token)
        if sample.logprob is not None:
            request.logprobs.append(sample.logprob)
            if request.sampling.top_logprobs:
                request.top_logprobs.append(sample.top)
        if request.record_timestamps:
            request.timestamps.append(now)
        self._extend_span(request)
        self.counters.generated_tokens += 1
        if sample.stops or sample.token in (request.sampling.eos_token_ids or ()):
            self._end(request, FinishReason.STOP, now)
        elif request.num_to_generate <= 0 or request.is_overdue(now):
            self._end(request, FinishReason.LENGTH, now)

    def _extend_span(self, request: ActiveRequest) -> None:
        end = len(request.output_ids)
        if request.spans and request.spans[-1].version == self.version:
            request.spans[-1] = WeightSpan(self.version, request.spans[-1].start, end)
        else:
            request.spans.append(WeightSpan(self.version, end - 1, end))

    def _end(self, request: ActiveRequest, reason: FinishReason, now: float, *, error: str | None = None) -> None:
        if self._running.pop(request.request_id, None) is not None:
            self._ending.add(request)
            self._release_when_landed(request)
        elif self._unborn.pop(request.request_id, None) is None:
            self._leave_line(request)
        self._release_children(request)
        request.status = STATUS_OF[reason]
        request.finish_reason = reason
        request.error = error
        request.ended_time = now
        self.counters.ended[reason.value] += 1

    def _preempt(self, request: ActiveRequest) -> None:
        """Sends a running request back to the line; what it generated stays."""
        assert request.num_in_flight == 0, "its row would write to blocks of somebody else"
        del self._running[request.request_id]
        self._free_blocks(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PENDING
        self.counters.preemptions += 1
        self._enter_line(request)

    def _release_when_landed(self, request: ActiveRequest) -> None:
        """Frees the blocks of an ended request, unless a step in flight writes to them still."""
        if request.num_in_flight == 0:
            self._ending.remove(request)
            self._free_blocks(request)

    def _free_blocks(self, request: ActiveRequest) -> None:
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.release(table)

    def _waiting(self) -> Iterator[ActiveRequest]:
        yield from self._line
        yield from self._held.values()

    def _is_held_back(self, request: ActiveRequest) -> bool:
        is_meant = self._holds_all or (self._holds_pinned and request.pinned_version is not None)
        return is_meant and not request.is_begun

    def _enter_line(self, request: ActiveRequest) -> None:
        if self._is_held_back(request):
            self._held[request.request_id] = request
        else:
            self._line.push(request)
        self._waiting_prefill_tokens += request.num_to_compute
        self._waiting_decode_tokens += request.num_to_generate

    def _leave_line(self, request: ActiveRequest) -> None:
        if self._held.pop(request.request_id, None) is None:
            self._line.remove(request)
        self._waiting_prefill_tokens -= request.num_to_compute
        self._waiting_decode_tokens -= request.num_to_generate


def _sits_out(request: ActiveRequest) -> bool:
    """True while a request cannot go on before a step in flight is committed, or its children would be left behind."""
    if request.num_to_compute != 1:
        return request.num_to_compute == 0
    is_last_on_its_way = request.num_pending > 0 and request.num_pending >= request.num_to_generate
    needs_the_token = request.num_pending > 0 and request.needs_last_token
    return is_last_on_its_way or needs_the_token or bool(request.children)


def _set_off(row: PlannedRow) -> None:
    row.request.num_computed = row.end
    row.request.num_scored = max(row.request.num_scored, row.scored.stop)
    row.request.num_pending += row.samples
    row.request.num_in_flight += 1
