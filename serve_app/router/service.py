"""What the HTTP routes and the Python handle share: prompts in, generations out."""

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

from engine import ContextLengthExceeded, InvalidRequest, SamplingParams, WorkloadHints
from serve_app.messages import GenerateRequest, Grammar
from serve_app.protocol.parsing import shorten, validate
from serve_app.protocol.requests import ChatRequest, Conversation, GenerationRequest, Message
from serve_app.resume_point import ResumePoint, ResumeTrail, check_point
from serve_app.router.admission import Admission
from serve_app.router.admitted_events import AdmittedEvents
from serve_app.router.answer import Answer, TextRules
from serve_app.router.chat_style import chat_style
from serve_app.router.fleet import Fleet, ModelLimits
from serve_app.router.fleet_watch import FleetWatch
from serve_app.router.generation import Generation, NoEvents
from serve_app.router.in_flight import InFlight
from serve_app.router.request_observer import RequestObserver
from serve_app.router.resuming_stream import ResumeMeter, ResumingStream
from serve_app.router.tenants import Tenants
from serve_app.router.version_gate import VersionGate
from serve_app.router.version_meter import MeteredEvents, VersionMeter
from serve_app.routing.prospect import Prospect
from serve_app.settings import AppSettings
from serve_app.text.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve.pitstop")

INLINE_CHARACTERS = 20_000
"""Of all prompts of a request; longer ones are tokenised in a thread: this many take about 10 ms, which every stream of
the router would feel."""

CHARACTERS_PER_TOKEN = 4
"""Of English text, so that a prompt which is cut may be longer than the model's length where that is large."""
SEED_BITS = 63
"""Of seeds that are drawn; as the engine draws them."""

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how it is to be answered, already in tokens. Raises InvalidRequest for what is none."""

    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hints: WorkloadHints = field(default_factory=WorkloadHints)
    rules: TextRules = field(default_factory=TextRules)
    cache_salt: str | None = None
    grammar: Grammar | None = None
    min_weight_version: int | None = None
    weight_version: int | None = None
    timeout_s: float | None = None
    """Until its last token; None is as long as any request may take."""
    route: str = "handle"
    """By which it came: answers of one route have lengths of one kind."""

    resume: ResumePoint | None = None
    """What was answered before, of the same request."""

    arrived_at: float | None = None
    """When it came to the router, on `time.perf_counter`; None is when it is opened."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty; it must hold at least one token", "prompt")
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"sampling is {shorten(self.sampling)}; it must be SamplingParams", "sampling")
        if not isinstance(self.hints, WorkloadHints):
            raise InvalidRequest(f"hints is {shorten(self.hints)}; it must be WorkloadHints", "hints")
        if not isinstance(self.resume, ResumePoint | None):
            raise InvalidRequest(f"resume is {shorten(self.resume)}; it must be a ResumePoint", "resume")
        # An empty stop string would end every answer before it begins.
        if not all(isinstance(stop, str) and stop for stop in self.rules.stop_strings):
            raise InvalidRequest(f"stop is {shorten(self.rules.stop_strings)}; it must hold non-empty strings", "stop")
        _check_version("min_weight_version", self.min_weight_version)
        _check_version("weight_version", self.weight_version)
        _check_timeout(self.timeout_s)
        if self.weight_version is not None and self.weight_version < (self.min_weight_version or 0):
            raise InvalidRequest(
                f"weight_version is {self.weight_version} and min_weight_version is {self.min_weight_version}; no"
                " weights are both, give one of them",
                "weight_version",
            )


class GenerationService:
    """Checks, tokenises and opens generations. For one event loop."""

    def __init__(
        self,
        settings: AppSettings,
        *,
        tokenizer: Tokenizer,
        fleet: Fleet,
        meter: VersionMeter,
        observer: RequestObserver,
        resumes: ResumeMeter,
    ) -> None:
        self._settings = settings
        self._seeds = random.Random(settings.engine_config.seed)
        self._resumes = resumes
        self._watch = FleetWatch(fleet.status, silent_after_s=settings.resume.silent_after_s)
        self.tokenizer = tokenizer
        self.style = chat_style(tokenizer, settings)
        self.fleet = fleet
        self._meter = meter
        self._observer = observer
        self.recorder = observer.recorder
        self.tenants = Tenants(settings.limits)
        self.in_flight = InFlight()
        max_waiting = settings.limits.max_queued_requests * settings.replicas.max
        self._gate = VersionGate(fleet, settings.limits, max_waiting=max_waiting, recorder=self.recorder)
        self.admission = Admission(
            settings.limits,
            max_waiting=max_waiting,
            recorder=self.recorder,
            prospect=self._prospect,
        )

    async def open(self, ask: Ask, *, first_index: int = 0) -> Generation:
        """Opens the generation; its owner primes it and closes it. Raises InvalidRequest and NoReplica.

        first_index: the number of its first answer among all of the request.
        There is no await once the stream is open, so a caller cannot be cancelled between opening and owning it.
        """
        self._check_limit(ask.timeout_s)
        limits = await self.fleet.limits()
        room = _room(ask, limits)
        _check_ids(ask.prompt_ids, limits.vocab_size)
        num_sequences = ask.sampling.num_return_sequences or 1
        # Drawn here, as a replica that goes on with it has to draw the same tokens.
        seed = self._seeds.getrandbits(SEED_BITS)
        sampling = ask.sampling if ask.sampling.seed is not None else replace(ask.sampling, seed=seed)
        own_ends = ask.sampling.eos_token_ids
        rules = replace(ask.rules, end_ids=limits.end_ids if own_ends is None else frozenset(own_ends))
        answers = [
            Answer(self.tokenizer, rules, index=first_index + number, prompt_ids=ask.prompt_ids)
            for number in range(num_sequences)
        ]
        trail = ResumeTrail(sampling.seed)
        if ask.resume is not None:
            check_point(ask.resume, num_outputs=num_sequences, vocab_size=limits.vocab_size, max_new_tokens=room)
            sampling, trail = _resumed(sampling, ask.resume, answers), ResumeTrail.starting_at(ask.resume)
            if ask.resume.has_ended:
                return Generation(NoEvents(), answers, prompt_ids=ask.prompt_ids, trail=trail)
        request = GenerateRequest(
            # Ours and not the client's: two clients may send the same id, and both are to be served.
            request_id=uuid.uuid4().hex,
            prompt_ids=ask.prompt_ids,
            sampling=sampling,
            hints=replace(
                ask.hints,
                max_prompt_length=len(ask.prompt_ids),
                max_generated_length=room,
                num_requests=num_sequences,
                expected_generated_length=ask.hints.expected_generated_length
                or self._observer.expected_length(ask.hints.tenant, ask.route),
            ),
            cache_salt=ask.cache_salt,
            grammar=ask.grammar,
            min_weight_version=ask.min_weight_version,
            weight_version=ask.weight_version,
            resumed=ask.resume.tokens if ask.resume is not None and ask.resume.has_tokens else None,
            resume_version=None if ask.resume is None else ask.resume.version,
            timeout_s=ask.timeout_s,
        )
        admitted = AdmittedEvents(self.admission, request, self._open, gate=self._gate)
        metered = MeteredEvents(admitted, self._meter)
        observed = self._observer.observe(metered, request, route=ask.route, arrived_at=ask.arrived_at)
        return Generation(
            observed,
            answers,
            prompt_ids=ask.prompt_ids,
            end_sequence=admitted.end_sequence,
            trail=trail,
            has_moved=lambda: admitted.has_moved,
            on_end=observed.end,
        )

    def _check_limit(self, timeout_s: float | None) -> None:
        limit_s = self._settings.limits.request_timeout_s
        if timeout_s is not None and timeout_s > limit_s:
            raise InvalidRequest(
                f"timeout_s is {timeout_s:g} and a request may take {limit_s:g} s in all; ask for less", "timeout_s"
            )

    def _prospect(self, request: GenerateRequest) -> Prospect | None:
        routing = self.fleet.routing()
        if routing is None:
            return None
        try:
            return routing.prospect(request)
        except Exception:
            # An estimate is worth no request.
            routing.reasons["fallback"] += 1
            logger.exception("event=prospect_failed fallback=unknown")
            return None

    def _open(self, request: GenerateRequest) -> ResumingStream:
        return ResumingStream(self.fleet, request, settings=self._settings, watch=self._watch, meter=self._resumes)

    async def prime(self, generation: Generation) -> None:
        """Waits for a place and the first token; raises whatever refuses the request."""
        await generation.prime(probe=self.fleet.probe_patiently)

    async def max_tokens(self, body: GenerationRequest) -> int | None:
        """Gives how many tokens the prompt of a request may have at most; None where it is cut to what fits."""
        return None if body.truncate_prompt_tokens is not None else (await self.fleet.limits()).max_model_len

    async def ids_of_prompts(self, prompts: Sequence[Prompt], *, max_tokens: int | None = None) -> list[list[int]]:
        """Gives the ids of each prompt of a request, by threads where they are long together; as `prompt_ids`."""
        is_inline = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE_CHARACTERS
        return [await self.prompt_ids(prompt, max_tokens=max_tokens, is_inline=is_inline) for prompt in prompts]

    async def prompt_ids(self, prompt: Prompt, *, max_tokens: int | None = None, is_inline: bool = True) -> list[int]:
        """Gives the ids of a prompt in any of its forms; raises InvalidRequest for what is none of them.

        max_tokens: ContextLengthExceeded is raised early where a text has many more. is_inline: false has a thread
        read also a short text.
        """
        if isinstance(prompt, str):
            return await self.text_ids(prompt, max_tokens=max_tokens, is_inline=is_inline)
        if not isinstance(prompt, Sequence):
            raise InvalidRequest(f"the prompt is {shorten(prompt)}; it must be text, token ids or messages", "prompt")
        # What came over a handle may be anything, whatever its type says; integers may be those of numpy.
        items: list[Any] = list(prompt)
        if set(map(type, items)) == {int}:
            # What comes over HTTP may be a million of them, which the question below takes a second for.
            return items
        if all(isinstance(item, Integral) for item in items):
            return [int(item) for item in items]
        return await self.chat_ids(validate(Conversation, {"messages": items}).messages, max_tokens=max_tokens)

    async def text_ids(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, is_inline: bool = True
    ) -> list[int]:
        """Gives the ids of a text, with the special tokens the model begins with; is_inline: as for `prompt_ids`."""
        await self._check_length(len(text), "prompt", max_tokens=max_tokens)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return encode() if is_inline and len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode)

    async def chat_ids(self, messages: Sequence[Message], body: ChatRequest | None = None, **options: Any) -> list[int]:
        """Gives the ids of a chat up to where the assistant answers.

        body: where it comes with tools. options: others of `Tokenizer.encode_chat`.
        """
        plain, tools = self.style.for_template(messages, body)
        num_characters = len(str(plain)) + len(str(tools))
        await self._check_length(num_characters, "messages", max_tokens=options.get("max_tokens"))
        if num_characters <= INLINE_CHARACTERS:
            return self.tokenizer.encode_chat(plain, tools, **options)
        return await asyncio.to_thread(self.tokenizer.encode_chat, plain, tools, **options)

    async def _check_length(self, num_characters: int, name: str, *, max_tokens: int | None) -> None:
        """Refuses what no number of tokens bounds: all of it would be read, in 1 s and 250 MB a million characters."""
        if max_tokens is not None:
            return
        fitting = CHARACTERS_PER_TOKEN * (await self.fleet.limits()).max_model_len
        limit = max(self._settings.limits.max_text_characters, fitting)
        if num_characters > limit:
            raise InvalidRequest(
                f"{name} has {num_characters} characters; of one that may be longer than the model's length at most"
                f" {limit} are read, send a part of it",
                name,
            )


def _room(ask: Ask, limits: ModelLimits) -> int:
    """Gives how many tokens an answer may have. Raises ContextLengthExceeded, InvalidRequest."""
    wanted = ask.sampling.max_new_tokens
    least = 1 if wanted is None else wanted
    num_prompt_tokens = len(ask.prompt_ids)
    if num_prompt_tokens + least > limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and {least} new ones are asked for; "
            f"together they may be {limits.max_model_len} at most",
            "prompt" if num_prompt_tokens >= limits.max_model_len else "max_tokens",
        )
    room = limits.max_model_len - num_prompt_tokens if wanted is None else wanted
    if (ask.sampling.min_new_tokens or 0) > room:
        raise InvalidRequest(
            f"min_new_tokens is {ask.sampling.min_new_tokens}, and the answer ends after {room} tokens; "
            "ask for fewer, or raise the limit",
            "min_new_tokens",
        )
    return room


def _check_ids(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an id that the model does not have; what answers continue is decoded here."""
    if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        index, token_id = next((at, one) for at, one in enumerate(prompt_ids) if not 0 <= one < vocab_size)
        raise InvalidRequest(
            f"the prompt has {token_id} at place {index}; ids of this model are 0 to {vocab_size - 1}", "prompt"
        )


def _resumed(sampling: SamplingParams, point: ResumePoint, answers: Sequence[Answer]) -> SamplingParams:
    """Has answers go on from a point, and gives the sampling for the rest; raises InvalidRequest where they cannot."""
    sampling = replace(sampling, seed=point.seed)
    for answer, ids, spans in zip(answers, point.tokens, point.spans or ((),) * len(answers), strict=True):
        if ids is None:
            answer.is_over = True
        elif ids:
            answer.go_on(ids, spans)
    # They came with the first tokens.
    return replace(sampling, prompt_logprobs=None) if point.has_tokens else sampling


def _check_version(name: str, version: object) -> None:
    """Raises InvalidRequest for what came over a handle and is no version."""
    if version is not None and (type(version) is not int or version < 1):
        raise InvalidRequest(f"{name} is {shorten(version)}; it must be a weight version, 1 or more", name)


def _check_timeout(timeout_s: object) -> None:
    """Raises InvalidRequest for what came over a handle and is no time."""
    if timeout_s is None:
        return
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise InvalidRequest(f"timeout_s is {shorten(timeout_s)}; it must be a number of seconds above 0", "timeout_s")
