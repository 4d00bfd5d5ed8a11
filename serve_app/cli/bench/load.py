"""Sends requests to an OpenAI endpoint and times what comes back: so many at once, or so many a second."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_MESSAGE_LENGTH = 200
"""Of what an endpoint says of a failure; enough for a sentence."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what each of them says beside its prompt. path: below the URL."""

    url: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    timeout_s: float
    trusts_environment: bool = True


@dataclass(frozen=True, slots=True)
class Level:
    """How requests come: `concurrency` at once, each after the answer to the one before, or `rate` a second.

    At a rate they come at random times, whether or not the ones before are answered.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def number(self) -> float:
        return self.concurrency if self.concurrency is not None else self.rate or 0.0

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency is not None else f"{self.rate:g} a second"


@dataclass(slots=True)
class Timed:
    """One request. Times are in seconds from when it was due; without an error all of them are there."""

    first_token_s: float = 0.0
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_chunks: int = 0
    is_whole: bool = False
    """It was told where the answer ends."""
    error: str | None = None

    @property
    def token_s(self) -> float | None:
        """Mean time of the tokens after the first; None for a single one."""
        if self.num_tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class Run:
    """What came of one level. wall_s: from the first request to the last answer."""

    level: Level
    requests: list[Timed] = field(default_factory=list)
    wall_s: float = 0.0


async def run_level(
    target: Target,
    level: Level,
    prompts: Sequence[dict[str, Any]],
    *,
    seed: int,
    report: Callable[[], None] = lambda: None,
) -> Run:
    """Sends every prompt once. report: is told of each that has ended."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    run = Run(level)
    began = time.perf_counter()

    async def send(client: httpx.AsyncClient, prompt: dict[str, Any], due: float) -> None:
        run.requests.append(await send_one(client, target, prompt, due=due))
        report()

    async with httpx.AsyncClient(
        timeout=httpx.Timeout(target.timeout_s), limits=limits, trust_env=target.trusts_environment
    ) as client:
        if level.concurrency is not None:
            waiting = list(reversed(prompts))

            async def work() -> None:
                while waiting:
                    await send(client, waiting.pop(), time.perf_counter())

            await asyncio.gather(*(work() for _ in range(level.concurrency)))
        else:
            draws, due = random.Random(seed), began
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    # Late ones are timed from when they were due, or a slow endpoint would look like a fast one.
                    await asyncio.sleep(due - time.perf_counter())
                    group.create_task(send(client, prompt, due))
                    due += draws.expovariate(level.rate or 1.0)
    run.wall_s = time.perf_counter() - began
    return run


async def send_one(client: httpx.AsyncClient, target: Target, prompt: dict[str, Any], *, due: float) -> Timed:
    """Sends one request and reads its stream to the end; what goes wrong is its error."""
    timed = Timed()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            client.stream(
                "POST", target.url + target.path, json=target.body | prompt, headers=target.headers
            ) as response,
        ):
            if not response.is_success:
                timed.error = f"HTTP {response.status_code}: {_message(await response.aread())}"
                return timed
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _read_event(line.removeprefix("data:").strip(), timed, due)
                if timed.error is not None:
                    return timed
    except TimeoutError:
        timed.error = f"no end within {target.timeout_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        timed.error = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_LENGTH].rstrip(": ")
    if timed.error is None and not timed.num_chunks:
        timed.error = "the stream ended without a token"
    if timed.error is None and not timed.is_whole:
        timed.error = "the stream was cut: it ended without a finish reason or [DONE]"
    # Where an endpoint counts nothing, a chunk stands for a token.
    timed.num_tokens = timed.num_tokens or timed.num_chunks
    return timed


def _read_event(data: str, timed: Timed, due: float) -> None:
    now = time.perf_counter() - due
    if data == "[DONE]":
        timed.is_whole = True
        return
    try:
        event = json.loads(data)
    except ValueError:
        timed.error = f"an event is no JSON: {data[:80]}"
        return
    try:
        _take_event(event, timed, now)
    except (TypeError, ValueError, AttributeError):
        timed.error = f"an event is no part of an answer: {data[:80]}"


def _take_event(event: Any, timed: Timed, now: float) -> None:
    """Raises TypeError and its like for what no endpoint of this kind sends."""
    if "error" in event:
        error = event["error"]
        timed.error = str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_MESSAGE_LENGTH]
        return
    if usage := event.get("usage"):
        timed.num_tokens = int(usage.get("completion_tokens") or 0)
        timed.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
    choices = event.get("choices") or ()
    timed.is_whole = timed.is_whole or any(choice.get("finish_reason") for choice in choices)
    if any(_has_text(choice) for choice in choices):
        timed.num_chunks += 1
        timed.first_token_s = timed.first_token_s or now
        timed.total_s = now


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls"))


def _message(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return text[:MAX_MESSAGE_LENGTH]
