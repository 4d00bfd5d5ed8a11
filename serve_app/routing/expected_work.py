"""The tokens that a request is expected to cost, as routers, replicas and admission count it."""

from serve_app.messages import GenerateRequest
from serve_app.routing.score import Work

DEFAULT_EXPECTED_TOKENS = 256
"""Of an answer of which nothing is known; about the mean answer of a chat model."""


def expected_work(request: GenerateRequest) -> Work:
    """Gives the work of one request: its prompt, and its hint, else its limit, else what is usual."""
    hints = request.hints
    # A hint beyond the room that there is would count for more than any answer can be.
    limit = request.sampling.max_new_tokens or hints.max_generated_length or None
    expected = hints.expected_generated_length or limit or DEFAULT_EXPECTED_TOKENS
    num_sequences, num_done = request.num_sequences, request.num_resumed_tokens
    num_tokens = num_sequences * (expected if limit is None else min(expected, limit))
    # What was generated elsewhere is computed as a prompt is.
    return Work(len(request.prompt_ids) + num_done, max(num_sequences, num_tokens - num_done), num_sequences)
