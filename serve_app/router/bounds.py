"""What one request may ask for at most, by the limits of the application."""

from collections.abc import Sized

from engine import InvalidRequest
from serve_app.protocol.requests import CompletionRequest, GenerationRequest
from serve_app.settings import AppSettings, LimitSettings


def check_bounds(body: GenerationRequest, limits: LimitSettings) -> None:
    """Raises InvalidRequest naming the first field that asks for more than the limits allow."""
    num_prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    if num_prompts * (body.n or 1) > limits.max_choices:
        raise InvalidRequest(
            f"n is {body.n or 1} for {num_prompts} prompt(s); a request may have {limits.max_choices} choices at most",
            "n" if num_prompts <= limits.max_choices else "prompt",
        )
    for name, limit in (("stop", limits.max_stop_strings), *((name, limits.max_listed) for name in _LISTED)):
        value: Sized = getattr(body, name) or ()
        if len(value) > limit:
            raise InvalidRequest(f"{name} has {len(value)} entries; at most {limit} are taken", name)


def check_prompt_scores(body: GenerationRequest, num_prompt_tokens: int, limits: LimitSettings) -> None:
    """Raises InvalidRequest where the answers would hold more log-probabilities of their prompts than are taken."""
    if body.num_prompt_logprobs is None:
        return
    # The token's own stands beside the most likely ones.
    num_scores = num_prompt_tokens * (body.n or 1) * (body.num_prompt_logprobs + 1)
    if num_scores > limits.max_prompt_logprobs:
        name = "prompt_logprobs" if body.prompt_logprobs == body.num_prompt_logprobs else "logprobs"
        raise InvalidRequest(
            f"{name} is {body.num_prompt_logprobs} for {num_prompt_tokens} tokens of prompts and n is {body.n or 1},"
            f" which makes {num_scores} log-probabilities; at most {limits.max_prompt_logprobs} are given, lower it",
            name,
        )


def check_priority(body: GenerationRequest, settings: AppSettings) -> None:
    """Raises InvalidRequest for a priority where the engine's order does not look at it."""
    order = settings.engine.scheduler_type
    if body.priority and order != "priority":
        raise InvalidRequest(
            f"priority is {body.priority}, and engine.scheduler_type is {order!r}, which ignores it; leave it out",
            "priority",
        )


_LISTED = ("logit_bias", "bad_words", "stop_token_ids")
