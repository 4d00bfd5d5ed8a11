"""What the next step computes (`plan`), and what its tokens mean (`commit`). No tensors, no clock of its own.

First come, first served: decoding requests first, then prompts in chunks, then the waiting line, whose head is never
overtaken. When blocks run out, the newest request goes back to the head of the line; its full blocks stay findable.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.active_request import ActiveRequest
from engine.block_pool import BlockPool, block_digest, root_digest
from engine.config import ResolvedConfig
from engine.metrics import EngineStats
from engine.plan import PlannedRow, SampledToken, StepPlan
from engine.request import FinishReason, RequestStatus, WeightSpan

MIN_PREFILL_TOKENS = 32
"""A step full of decoding requests still takes so many prompt tokens, or prompts would starve."""


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    ended: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})


class Scheduler:
    """Owns every active request and the block pool.

    Invariants: every request waits or runs; waiting ones hold no block; running ones are older than waiting ones.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.counters = Counters()
        self.version = 1
        self._waiting: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._running: dict[str, ActiveRequest] = {}
        self._waiting_prefill_tokens = 0
        self._waiting_decode_tokens = 0

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[ActiveRequest]:
        """All active requests, oldest first."""
        return [*self._running.values(), *self._waiting.values()]

    def add(self, request: ActiveRequest) -> None:
        """Puts a checked request at the end of the line."""
        assert request.request_id not in self._waiting
        assert request.request_id not in self._running
        self._enter_line(request)
        self.counters.prompt_tokens += len(request.prompt_ids)

    def plan(self, max_tokens: int, now: float) -> StepPlan:
        """Chooses the rows of the next step and gives them blocks, decoding ones first.

        `max_tokens` is a wish: prompts get MIN_PREFILL_TOKENS even beyond it. `config.max_batch_tokens` is a bound.
        """
        rows: dict[str, PlannedRow] = {}
        for request in self._oldest_first(is_decoding=True):
            self._plan_row(request, 1, rows)
        budget = min(
            max(max_tokens - len(rows), MIN_PREFILL_TOKENS),
            self.config.max_batch_tokens - len(rows),
        )
        for request in self._oldest_first(is_decoding=False):
            if budget == 0:
                break
            budget -= self._plan_row(request, min(budget, request.num_to_compute), rows)
        while budget > 0 and self._waiting and len(self._running) < self.config.max_requests_per_batch:
            admitted = self._admit_head(budget, now)
            if admitted is None:
                break
            budget -= self._plan_row(admitted, min(budget, admitted.num_to_compute), rows)
        return StepPlan(list(rows.values()))

    def commit(self, plan: StepPlan, samples: dict[str, SampledToken], now: float) -> list[ActiveRequest]:
        """Takes the outcome of a step in; gives the requests that have something new to tell.

        Every row that samples has an entry in `samples`; a row without `samples` may have one that carries an error.
        """
        told = []
        for row in plan.rows:
            sample = samples.get(row.request.request_id)
            if sample is not None and sample.error is not None:
                # The content of its newest blocks is not to be trusted: end without publishing them.
                self._end(row.request, FinishReason.FAILED, now, error=sample.error)
                told.append(row.request)
                continue
            row.request.num_computed = row.end
            self._publish_full_blocks(row.request)
            if sample is not None:
                self._append(row.request, sample, now)
                told.append(row.request)
        return told

    def end(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        *,
        error: str | None = None,
    ) -> ActiveRequest | None:
        """Ends a request before its time (cancelled, failed) and frees its blocks; None when it is not active."""
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is not None:
            self._end(request, reason, now, error=error)
        return request

    def set_version(self, version: int, *, recompute: bool = False) -> None:
        """Starts a new weight version: no prefix of another version is found or published from here on.

        Requests in flight keep their keys and values, or with `recompute` go back to the line and compute them anew.
        """
        self.version = version
        for request in reversed(list(self._running.values())):
            if recompute:
                self._preempt(request)
            else:
                request.chain_version = None

    def stats(self) -> EngineStats:
        """The numbers this class knows; the loop adds its own."""
        running = self._running.values()
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            queued_prefill_tokens=self._waiting_prefill_tokens
            + sum(request.num_to_compute for request in running if request.num_to_compute > 1),
            pending_decode_tokens=self._waiting_decode_tokens + sum(request.num_to_generate for request in running),
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_blocks - self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            page_size=self.config.page_size,
            weight_version=self.version,
            prompt_tokens_total=self.counters.prompt_tokens,
            cached_tokens_total=self.counters.cached_tokens,
            generated_tokens_total=self.counters.generated_tokens,
            preemptions_total=self.counters.preemptions,
            requests_total=dict(self.counters.ended),
        )

    def check_invariants(self) -> None:
        """Asserts what the class promises; for tests."""
        self.pool.check_invariants()
        held: dict[int, int] = {}
        for request in self._running.values():
            assert 0 <= request.num_computed <= request.num_tokens
            assert len(request.block_ids) * self.config.page_size >= request.num_computed
            assert len(request.digests) <= len(request.block_ids)
            for block in request.block_ids:
                held[block] = held.get(block, 0) + 1
        assert held == {block: n for block, n in enumerate(self.pool._num_holders) if n > 0}
        for request in self._waiting.values():
            assert not request.block_ids
            assert request.num_computed == 0
        assert self._waiting_prefill_tokens == sum(request.num_to_compute for request in self._waiting.values())
        assert self._waiting_decode_tokens == sum(request.num_to_generate for request in self._waiting.values())

    def _oldest_first(self, *, is_decoding: bool) -> Iterator[ActiveRequest]:
        for request in list(self._running.values()):
            # An older request may have sent this one back to the line meanwhile.
            if request.request_id in self._running and (request.num_to_compute == 1) == is_decoding:
                yield request

    def _plan_row(self, request: ActiveRequest, num_new: int, rows: dict[str, PlannedRow]) -> int:
        """Adds a row of `num_new` tokens, sending newer requests back for their blocks where needed; gives its size."""
        start, end = request.num_computed, request.num_computed + num_new
        num_missing = -(-end // self.config.page_size) - len(request.block_ids)
        while num_missing > self.pool.num_free:
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            rows.pop(victim.request_id, None)
            if victim is request:
                return 0
        if num_missing > 0:
            request.block_ids += self.pool.acquire(num_missing)
        rows[request.request_id] = PlannedRow(
            request=request,
            start=start,
            token_ids=request.token_ids[start:end],
            block_ids=list(request.block_ids),
            samples=end == request.num_tokens,
        )
        return num_new

    def _admit_head(self, budget: int, now: float) -> ActiveRequest | None:
        """Moves the head of the line to the running ones if blocks are there for it; with its prefix hit taken."""
        request = next(iter(self._waiting.values()))
        hit = self._find_prefix(request)
        num_cached = len(hit) * self.config.page_size
        num_first = min(budget, request.num_tokens - num_cached)
        num_needed = -(-(num_cached + num_first) // self.config.page_size) - len(hit)
        num_free = self.pool.num_free - self.pool.num_free_among(hit)
        reserve = int(self.config.safety_margin * self.pool.num_blocks) if self._running else 0
        if num_needed + reserve > num_free:
            return None
        self._leave_line(request)
        self.pool.share(hit)
        self._running[request.request_id] = request
        request.status = RequestStatus.PREFILLING
        request.block_ids, request.digests = hit, request.digests[: len(hit)]
        request.num_computed = num_cached
        request.chain_version = self.version
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            request.first_scheduled_time = now
            self.counters.cached_tokens += num_cached
        return request

    def _find_prefix(self, request: ActiveRequest) -> list[int]:
        """Gives the known blocks of the prefix; never all tokens, since one has to be computed to sample after it."""
        if not self.config.allow_block_sharing:
            return []
        page = self.config.page_size
        num_full = (request.num_tokens - 1) // page
        if request.chain_version != self.version:
            request.digests = []
            request.chain_version = self.version
        parent = request.digests[-1] if request.digests else root_digest(self.version, request.cache_salt)
        for index in range(len(request.digests), num_full):
            parent = block_digest(parent, request.token_ids[index * page : (index + 1) * page])
            request.digests.append(parent)
        return self.pool.lookup(request.digests[:num_full])

    def _publish_full_blocks(self, request: ActiveRequest) -> None:
        if request.chain_version is None or not self.config.allow_block_sharing:
            return
        page = self.config.page_size
        for index in range(len(request.digests), request.num_computed // page):
            parent = request.digests[-1] if request.digests else root_digest(self.version, request.cache_salt)
            digest = block_digest(parent, request.token_ids[index * page : (index + 1) * page])
            request.digests.append(digest)
            self.pool.publish(request.block_ids[index], digest)

    def _append(self, request: ActiveRequest, sample: SampledToken, now: float) -> None:
        request.status = RequestStatus.DECODING
        request.token_ids.append(sample.token)
        request.output_ids.append(sample.token)
        if sample.logprob is not None:
            request.logprobs.append(sample.logprob)
        if request.record_timestamps:
            request.timestamps.append(now)
        self._extend_span(request)
        self.counters.generated_tokens += 1
        if sample.token in (request.sampling.eos_token_ids or ()):
            self._end(request, FinishReason.STOP, now)
        elif request.num_to_generate <= 0:
            self._end(request, FinishReason.LENGTH, now)

    def _extend_span(self, request: ActiveRequest) -> None:
        end = len(request.output_ids)
        if request.spans and request.spans[-1].version == self.version:
            request.spans[-1] = WeightSpan(self.version, request.spans[-1].start, end)
        else:
            request.spans.append(WeightSpan(self.version, end - 1, end))

    def _end(
        self,
        request: ActiveRequest,
        reason: FinishReason,
        now: float,
        *,
        error: str | None = None,
    ) -> None:
        if request.request_id in self._running:
            del self._running[request.request_id]
            self._free_blocks(request)
        else:
            self._leave_line(request)
        request.status = STATUS_OF[reason]
        request.finish_reason = reason
        request.error = error
        request.ended_time = now
        self.counters.ended[reason.value] += 1

    def _preempt(self, request: ActiveRequest) -> None:
        """Sends a running request back to the head of the line; what it generated stays."""
        del self._running[request.request_id]
        self._free_blocks(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PENDING
        self.counters.preemptions += 1
        self._enter_line(request)
        self._waiting.move_to_end(request.request_id, last=False)

    def _free_blocks(self, request: ActiveRequest) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []

    def _enter_line(self, request: ActiveRequest) -> None:
        self._waiting[request.request_id] = request
        self._waiting_prefill_tokens += request.num_to_compute
        self._waiting_decode_tokens += request.num_to_generate

    def _leave_line(self, request: ActiveRequest) -> None:
        del self._waiting[request.request_id]
        self._waiting_prefill_tokens -= request.num_to_compute
        self._waiting_decode_tokens -= request.num_to_generate


STATUS_OF = {
    FinishReason.STOP: RequestStatus.FINISHED,
    FinishReason.LENGTH: RequestStatus.FINISHED,
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.FAILED: RequestStatus.FAILED,
}
