"""Deployments that stand in for engine and controller: they answer as the real ones do, without a model.

An engine answers with the prompt itself, two tokens an event. What else it does is asked for by `cache_salt`; an
endless answer ends when it goes on after its replica died.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import replace

from ray import serve

from engine import (
    InvalidRequest,
    QueueFull,
    SwapConflict,
    WeightsInvalid,
    WeightSpan,
    WeightVersionGone,
    sequence_ids,
)
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    FleetStatus,
    GenerateRequest,
    ReplicaReport,
    RollbackRequest,
    SwapRequest,
    SwapResult,
    TokenEvent,
)
from serve_app.protocol.errors import VersionUnavailable, WeightVersionUnavailable

EOS_ID = 0
MAX_MODEL_LEN = 200


@serve.deployment(name="FakeEngine", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class FakeEngine:
    def __init__(self) -> None:
        self._open: set[str] = set()
        self._ended: set[str] = set()
        self._never = asyncio.Event()
        self._version = 1

    async def set_version(self, version: int) -> None:
        self._version = version

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        refuse(request.cache_salt)
        if not request.accepts(self._version):
            kind = WeightVersionUnavailable if request.weight_version is None else WeightVersionGone
            raise kind(f"this replica serves weight version {self._version}")
        if request.cache_salt == "poison":
            os._exit(1)
        self._open.add(request.request_id)
        try:
            if request.cache_salt == "silent":
                await self._never.wait()
            async for event in self._echo(request):
                yield event
        finally:
            self._open.discard(request.request_id)

    async def _echo(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        ids = [*request.prompt_ids, EOS_ID][: request.sampling.max_new_tokens]
        names = [request.request_id, *sequence_ids(request.request_id, request.sampling.num_return_sequences or 1)[:-1]]
        reason = "stop" if ids[-1] == EOS_ID else "length"
        resumed = request.resumed or ((),)
        for start in range(len(resumed[0] or ()), len(ids), 2):
            if start == 2 and request.cache_salt == "endless" and request.resumed is None:
                await self._never.wait()
            is_failed = start == 2 and request.cache_salt == "fail"
            is_last = start + 2 >= len(ids)
            tokens = ids[start : start + 2]
            own, *others = (
                TokenEvent(
                    request_id=name,
                    token_ids=tokens,
                    logprobs=[-0.5] * len(tokens) if request.sampling.logprobs else [],
                    weight_versions=(WeightSpan(1 if start < 4 else 2, start, start + len(tokens)),),
                    finish_reason="failed" if is_failed else reason if is_last else None,
                    error="the logits are not finite" if is_failed else None,
                    num_cached_tokens=3,
                    replica_id="fake",
                    index=index,
                )
                for index, name in enumerate(names)
                if name not in self._ended
            )
            yield replace(own, more=others)
            if is_failed:
                return

    async def end_sequence(self, sequence_id: str) -> None:
        self._ended.add(sequence_id)

    async def crash(self) -> None:
        os._exit(1)

    async def num_open(self) -> int:
        return len(self._open)

    async def model_info(self) -> dict[str, int | tuple[int, ...]]:
        return {"max_model_len": MAX_MODEL_LEN, "vocab_size": 320, "end_ids": (), "weight_version": 1}

    async def metrics(self) -> str:
        return (
            '# HELP pitstop_engine_alive 1.\n# TYPE pitstop_engine_alive gauge\npitstop_engine_alive{replica="0"} 1.0\n'
        )


def refuse(script: str | None) -> None:
    if script == "refuse":
        raise InvalidRequest("id 999 is not in the vocabulary", param="input_ids")
    if script == "full":
        raise QueueFull("7 requests wait already", 7)
    if script == "bug":
        raise RuntimeError("secret detail")


@serve.deployment(name="FakeController", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class FakeController:
    def __init__(self) -> None:
        self._version = 1
        self._asked: SwapRequest | RollbackRequest | None = None

    async def swap(self, request: SwapRequest) -> SwapResult:
        assert (request.in_flight, request.cast) == ("keep", False)
        self._asked = request
        if request.source.path == "/bad":
            raise WeightsInvalid("lm_head.weight holds NaN", tensor="lm_head.weight")
        if request.source.path == "/busy":
            raise SwapConflict("swap s1 is under way")
        return SwapResult(2, 1, ["fake"], staged_s=0.5, paused_s=0.04, total_s=0.6, swap_id="s2")

    async def rollback(self, request: RollbackRequest) -> SwapResult:
        self._asked = request
        if request.version == 9:
            raise VersionUnavailable("version 9 is not in the history; it holds 1")
        return SwapResult(3, 2, ["fake"], staged_s=0.5, paused_s=0.04, total_s=0.6, swap_id="s3")

    async def asked(self) -> SwapRequest | RollbackRequest | None:
        return self._asked

    async def status(self) -> FleetStatus:
        history = [CommittedVersion(self._version, label="base", committed_at="now", requested_by="me")]
        return FleetStatus(await self.committed(), [ReplicaReport("fake", self._version, "ready")], history=history)

    async def committed(self) -> CommittedWeights:
        return CommittedWeights(self._version)

    async def set_committed(self, version: int) -> None:
        self._version = version

    async def metrics(self) -> str:
        return ""
