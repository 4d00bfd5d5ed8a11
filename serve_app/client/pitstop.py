"""The application, from any event loop."""

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Unpack

from ray import serve
from ray.serve.handle import DeploymentHandle

from engine import PitstopError, QueueFull, SamplingParams, WorkloadHints
from serve_app.client.completion import Completion, join_events
from serve_app.client.options import SwapHow, SwapKeywords
from serve_app.client.resuming import resumed_stream
from serve_app.client.swap import Swap, TensorObject
from serve_app.client.transport import GROUP_TIMEOUT_S, group_options
from serve_app.controller import CONTROLLER_DEPLOYMENT
from serve_app.messages import (
    FleetStatus,
    PauseLease,
    RollbackRequest,
    SessionRequest,
    SwapRequest,
    SwapResult,
    TokenEvent,
    WeightSource,
)
from serve_app.protocol.errors import DeadlineExceeded, NoReplica
from serve_app.resume_point import ResumePoint
from serve_app.router.handle_stream import call
from serve_app.router.service import Prompt

TIMEOUT_S = 3600.0
"""The router's own limit of a request is shorter; this one ends the wait for a router that is gone."""
MAX_CONCURRENT = 128
"""Prompts of a batch in flight at once: enough to fill an engine's batch, below what its queue refuses."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
"""A batch that meets a full queue tries again, doubling its wait between these."""
LEASE_S = 60.0
"""Of a swap session: a trainer that is alive renews it four times as often."""
STATUS_INTERVAL_S = 0.2
"""Between two looks of one that waits; replicas report once a second."""
LOOK_S = 1.0
"""What a look may take at least, also where hardly any time is left to wait."""


class Pitstop:
    """An application, from any event loop. Prompts are text, token ids, or the messages of a chat."""

    def __init__(self, handle: DeploymentHandle[Any], *, timeout_s: float = TIMEOUT_S) -> None:
        # The methods of a handle are made at run time, so types end here and begin again at what each call returns.
        self._handle: Any = handle
        self._stream_handle: Any = handle.options(stream=True)
        self._controller: DeploymentHandle[Any] | None = None
        self._timeout_s = timeout_s

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        hints: WorkloadHints | None = None,
        *,
        stop: str | Sequence[str] = (),
        cache_salt: str | None = None,
        structured: Mapping[str, Any] | None = None,
        min_weight_version: int | None = None,
        weight_version: int | None = None,
        resume: ResumePoint | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Gives token events as they come; the first has the prompt's ids, the last, alone, a finish reason.

        With `num_return_sequences` in `sampling` that holds for each sequence; an event's `index` says which it is of.
        Closing the generator (leaving the loop, `aclose`) ends the request in the engine. structured: what the answer
        has to follow: one of json (a schema), json_object, regex, choice and grammar. min_weight_version: the least
        version of the weights that may answer; raises WeightVersionUnavailable where it is not committed in time.
        weight_version: the only one that may; raises WeightVersionGone where no replica serves it, and one that is
        swapped away later ends the answer with the finish reason `weight_version_gone`.

        Where the router that answers is lost, the stream goes on at another one by itself, with the same tokens.
        resume: the point of a stream of this same request that was cut (`ResumeTrail.point`), to go on from there.
        timeout_s: until the last token; raises TooLate or DeadlineTooShort at once where that cannot be.
        """
        ask = partial(
            self._stream_handle.generate.remote,
            prompt,
            sampling,
            hints,
            stop=stop,
            cache_salt=cache_salt,
            structured=structured,
            min_weight_version=min_weight_version,
            weight_version=weight_version,
            timeout_s=timeout_s,
        )
        events = resumed_stream(ask, resume, num_sequences=_num_sequences(sampling), timeout_s=self._timeout_s)
        async with aclosing(events):
            async for event in events:
                yield event

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        structured: Mapping[str, Any] | None = None,
        min_weight_version: int | None = None,
        weight_version: int | None = None,
        max_concurrent: int = MAX_CONCURRENT,
    ) -> list[Completion | PitstopError]:
        """Gives one output for each prompt, in their order; a prompt that fails gives its own error.

        sampling is one for all, or one for each; structured and the weight versions are as in `generate`. A full queue
        is waited for, up to the timeout of this object.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is one text; give a list of prompts")
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"sampling has {len(each)} items for {len(prompts)} prompts; give one, or one for each")
        if any(_num_sequences(params) > 1 for params in each):
            raise ValueError(
                "num_return_sequences is above 1; a batch has one output for each prompt, so repeat the prompt"
            )
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent is {max_concurrent}; it must be at least 1")
        places = asyncio.Semaphore(max_concurrent)

        async def complete(prompt: Prompt, params: SamplingParams | None) -> Completion | PitstopError:
            ask = partial(
                self.generate,
                prompt,
                params,
                stop=stop,
                structured=structured,
                min_weight_version=min_weight_version,
                weight_version=weight_version,
            )
            async with places:
                try:
                    return await self._complete(ask)
                except PitstopError as error:
                    return error

        return await asyncio.gather(*(complete(prompt, params) for prompt, params in zip(prompts, each, strict=True)))

    def swap(
        self,
        *,
        lease_s: float = LEASE_S,
        transport: str = "object_store",
        backend: str | None = None,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        **options: Unpack[SwapKeywords],
    ) -> Swap:
        """Gives a swap session: `async with pitstop.swap() as swap: await swap.put(named_tensors)`.

        Leaving it brings what was put to every replica, or raises with the old weights serving; by an exception it is
        aborted. options: those of `SwapRequest`. With `partial`, what is not put keeps its value, and
        `swap.result.unchanged` names it.
        lease_s: how long after the death of this process the session is dropped.
        transport: "object_store" is Ray's; "torch_distributed" broadcasts over a process group of its own, of this
        process and a receiver beside the controller, with the backend "gloo" (the default) or "nccl".
        group_timeout_s: how long one side of it waits for the other.
        """
        session_id = uuid.uuid4().hex
        # So that the outcome can be asked for where the answer is lost.
        options["idempotency_key"] = options.get("idempotency_key") or session_id
        requester = f"Python client, process {os.getpid()} on {socket.gethostname()}"
        request = SwapRequest(WeightSource(), requested_by=requester, **options)
        if self._controller is None:
            # Once, as every handle makes connections of its own.
            self._controller = serve.get_deployment_handle(CONTROLLER_DEPLOYMENT, self._handle.app_name)
        group = group_options(transport, backend=backend, timeout_s=group_timeout_s)
        return Swap(
            self._controller, SessionRequest(session_id, request, lease_s), timeout_s=self._timeout_s, group=group
        )

    async def swap_weights(self, source: str | TensorObject, **options: Unpack[SwapKeywords]) -> SwapResult:
        """Replaces the weights of the whole fleet by those of a source; options are those of `SwapRequest`.

        That is a folder that every replica can read; or a state dict, as such, as a reference in Ray's object store
        (`ray.put`), or as a list of references to its parts, of which one at a time is in memory.
        Raises WeightsSourceError, WeightsInvalid and SwapConflict; the old weights then go on serving. Sent again with
        the idempotency_key of a swap that was committed, it gives that one's result and changes nothing.
        """
        if isinstance(source, str):
            return await self.submit_swap(SwapRequest(WeightSource(source), **options))
        async with self.swap(**options) as swap:
            await swap.put_objects(source)
        return swap.result

    async def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> FleetStatus:
        """Waits until every replica serves at least this version; raises DeadlineExceeded when it takes too long."""
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        while True:
            status = await self._look(version, give_up_at, timeout_s=timeout_s)
            behind = [report.replica_id for report in status.replicas if report.version < version]
            if status.replicas and not behind and status.committed.version >= version:
                return status
            if asyncio.get_running_loop().time() + STATUS_INTERVAL_S > give_up_at:
                raise DeadlineExceeded(
                    f"weight version {version} was not served everywhere within {timeout_s:g} s: committed is "
                    f"{status.committed.version}, behind are {', '.join(behind) or 'none of the replicas'}"
                )
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def rollback(self, version: int | None = None, **options: Unpack[SwapHow]) -> SwapResult:
        """Brings an earlier version's weights back under a new number; by default those before the committed ones.

        options are those of `SwapOptions`. Raises VersionUnavailable where the history does not hold the version or its
        folder is gone. Without a version, a second rollback goes back to what the first one left.
        """
        return await self.submit_swap(RollbackRequest(version=version, **options))

    async def submit_swap(self, request: SwapRequest | RollbackRequest) -> SwapResult:
        """Carries out a swap or a rollback with any of its options; raises as `swap_weights` and `rollback` do."""
        method = self._handle.swap if isinstance(request, SwapRequest) else self._handle.roll_back
        return await call(method.remote(request), timeout_s=self._timeout_s, whom="the router")

    async def pause(self, *, lease_s: float, in_flight: str = "keep") -> PauseLease:
        """Has every replica stand still, and gives the lease once all do; requests wait meanwhile.

        It ends by itself after lease_s without `renew_pause`. in_flight: "finish" lets running requests finish first.
        Raises WeightsError, with nobody paused, where a replica cannot.
        """
        response = self._handle.pause.remote(lease_s, in_flight)
        return await call(response, timeout_s=self._timeout_s, whom="the router")

    async def renew_pause(self, lease_id: str, *, lease_s: float | None = None) -> PauseLease:
        """Prolongs a pause, by its own length where none is given; raises LeaseGone once it is over."""
        response = self._handle.renew_pause.remote(lease_id, lease_s)
        return await call(response, timeout_s=self._timeout_s, whom="the router")

    async def resume(self, lease_id: str | None = None) -> list[str]:
        """Ends one pause, or all, and gives their leases; raises LeaseGone where that one is over already."""
        return await call(self._handle.resume.remote(lease_id), timeout_s=self._timeout_s, whom="the router")

    async def status(self) -> FleetStatus:
        """Gives the committed weights and what every replica reports."""
        return await self._status(self._timeout_s)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Gives the ids of a prompt, chat template included."""
        return await call(self._handle.tokenize.remote(prompt), timeout_s=self._timeout_s, whom="the router")

    async def _look(self, version: int, give_up_at: float, *, timeout_s: float) -> FleetStatus:
        left_s = max(LOOK_S, give_up_at - asyncio.get_running_loop().time())
        try:
            return await self._status(min(left_s, self._timeout_s))
        except NoReplica as error:
            if asyncio.get_running_loop().time() < give_up_at:
                raise
            raise DeadlineExceeded(
                f"it is not known whether weight version {version} was served within {timeout_s:g} s: {error}"
            ) from error

    async def _status(self, timeout_s: float) -> FleetStatus:
        return await call(self._handle.status.remote(), timeout_s=timeout_s, whom="the router")

    async def _complete(self, ask: Callable[[], AsyncGenerator[TokenEvent, None]]) -> Completion:
        retry_s = FIRST_RETRY_S
        give_up_at = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                return join_events([event async for event in ask()])
            except QueueFull:
                if asyncio.get_running_loop().time() + retry_s > give_up_at:
                    raise
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)


def _num_sequences(sampling: SamplingParams | None) -> int:
    # Anything else is refused by the router, in its own words.
    return (sampling.num_return_sequences or 1) if isinstance(sampling, SamplingParams) else 1
