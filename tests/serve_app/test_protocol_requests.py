import dataclasses
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import serve_app.protocol
from engine import InvalidRequest, SamplingParams, WorkloadHints
from serve_app.messages import Probes, WeightSource
from serve_app.protocol.parsing import parse_body, read_object
from serve_app.protocol.requests import ChatRequest, CompletionRequest
from serve_app.protocol.strict import RequestModel
from serve_app.protocol.weights import PauseBody, RollbackBody, SwapBody
from serve_app.router.bounds import check_bounds
from serve_app.settings import LimitSettings

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def refusal(parse: Any, **fields: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value.param, str(caught.value)


def test_a_plain_chat_samples_with_the_defaults_of_openai() -> None:
    assert chat().sampling() == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0,
        repetition_penalty=1.0, min_new_tokens=0, logprobs=False, top_logprobs=0, num_return_sequences=1,
    )  # fmt: skip


def test_every_supported_parameter_reaches_the_engine() -> None:
    request = chat(
        temperature=0, top_p=0.5, top_k=7, seed=3, max_completion_tokens=9, ignore_eos=True, logprobs=True, user="t",
        session_id="s", stop="x", min_p=0.1, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 1.5}, bad_words=["w"], allowed_token_ids=[5, 6], min_tokens=2, stop_token_ids=[8],
        n=4, top_logprobs=3, prompt_logprobs=1,
    )  # fmt: skip
    assert request.sampling([[9]]) == SamplingParams(
        temperature=0.0, top_k=7, top_p=0.5, seed=3, max_new_tokens=9, eos_token_ids=(), logprobs=True, min_p=0.1,
        frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5, sequence_bias={(5,): -100.0, (6,): 1.5},
        bad_words_ids=[[9]], allowed_token_ids=[5, 6], min_new_tokens=2, stop_token_ids=[8], num_return_sequences=4,
        top_logprobs=3, prompt_logprobs=1,
    )  # fmt: skip
    assert request.workload_hints() == WorkloadHints(session_id="s", tenant="t")
    assert request.stop == ["x"]


def test_a_completion_gives_sixteen_tokens_and_a_chat_as_many_as_fit() -> None:
    assert completion().max_new_tokens == 16
    assert chat().max_new_tokens is None


@pytest.mark.parametrize("fields", [
    {"n": 1}, {"n": None}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"logit_bias": None},
    {"logit_bias": {}}, {"store": False}, {"top_logprobs": 0}, {"tools": []}, {"tool_choice": "none"},
    {"response_format": {"type": "text"}}, {"stream_options": None}, {"stop": None}, {"stop": []},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}, {"temperature": None},
    {"service_tier": "auto"}, {"modalities": ["text"]}, {"metadata": None}, {"top_k": -1},
])  # fmt: skip
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling() == chat().sampling()


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": True}, "n", "valid integer"),
    ({"temprature": 1}, "temprature", "temprature is not a parameter of this endpoint"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"max_tokens": 0}, "max_tokens", "without echo or prompt_logprobs"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "must be a token id"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "must be a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]", "less than or equal to 100"),
    ({"logit_bias": [5]}, "logit_bias", "dictionary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
    ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
    ({"best_of": 2}, "best_of", "only 1 is supported"),
    ({"stop": [""]}, "stop[0]", "at least 1 character"),
    ({"stop": "x" * 257}, "stop[0]", "at most 256"),
    ({"logprobs": 1}, "logprobs", "valid boolean"),
    ({"top_logprobs": 5}, "top_logprobs", "needs logprobs=true"),
    ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"functions": [{"name": "f"}]}, "functions", "only []"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"include_resume": True}}, "stream_options.include_resume", "chats cannot"),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include", "not a parameter"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [USER, {"role": "judge", "content": "x"}]}, "messages[1].role", "'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "dict"),
    ({"user": ""}, "user", "at least 1 character"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "at most 1024"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    got_param, got_message = refusal(chat, **fields)
    assert got_param == param
    assert got_message.startswith(param)
    assert message in got_message


@pytest.mark.parametrize(("name", "shown"), [
    ("top-k", "top-k"), ("str", "str"), ("a.b", "a.b"), ("naïve", "naïve"), ("list[TextPart]", "list[TextPart]"),
    ("0", "0"), ("", "''"), ("\n", r"'\n'"),
])  # fmt: skip
def test_an_unknown_parameter_is_named_whatever_it_is_called(name: str, shown: str) -> None:
    for parse, fields, place in (
        (chat, {name: 1}, shown),
        (completion, {name: None}, shown),
        (chat, {"messages": [{**USER, name: 1}]}, f"messages[0].{shown}"),
    ):
        param, message = refusal(parse, **fields)
        assert (param, message) == (place, f"{place} is not a parameter of this endpoint")


@pytest.mark.parametrize(("fields", "param"), [
    ({"\ud800": 1}, None), ({"messages": [{**USER, "\ud800": 1}]}, "messages[0]"), ({"user": "\ud800"}, "user"),
    ({"stop": ["a", "\ud800"]}, "stop[1]"),
])  # fmt: skip
def test_half_a_surrogate_pair_is_placed_and_never_repeated(fields: dict[str, Any], param: str | None) -> None:
    got_param, message = refusal(chat, **fields)
    assert (got_param, message.split(" holds ")[0]) == (param, param or "the body")
    assert "half a surrogate pair" in message
    # The answer has to be encoded, too.
    message.encode()


def test_a_refusal_repeats_little_of_a_huge_value() -> None:
    assert len(refusal(chat, **{"x" * 100_000: 1})[1]) < 200
    assert len(refusal(chat, logit_bias={"x" * 10_000: 1})[1]) < 200
    assert len(refusal(chat, temperature="x" * 100_000)[1]) < 200


def test_an_answer_sent_back_as_a_message_is_accepted() -> None:
    answer = {"role": "assistant", "content": "Paris", "refusal": None, "tool_calls": None, "annotations": []}
    assert [m.for_template() for m in chat(messages=[USER, answer, USER]).messages][1] == {
        "role": "assistant",
        "content": "Paris",
    }


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].for_template()["content"] == "a\nb"


@pytest.mark.parametrize(("prompt", "expected"), [
    ("a", ["a"]), (["a"], ["a"]), ([1, 2], [[1, 2]]), ([[1, 2]], [[1, 2]]), (["a", [1], "b"], ["a", [1], "b"]),
])  # fmt: skip
def test_prompts_are_text_or_ids_one_or_several(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(("prompt", "message"), [
    ("", "empty"), ([], "empty"), ([[]], "empty"), (["a", ""], "empty"), ([[1], []], "empty"),
    ([1, "a"], "must be text"), ([1.5], "must be text"), ([True], "must be text"), (None, "must be text"),
])  # fmt: skip
def test_other_prompts_are_refused(prompt: Any, message: str) -> None:
    assert message in refusal(completion, prompt=prompt)[1]


def test_log_probabilities_of_a_completion_are_a_number_of_the_most_likely() -> None:
    assert completion().sampling().logprobs is False
    for fields, logprobs, num_top, prompt in (
        ({"logprobs": 0}, True, 0, None),
        ({"logprobs": 5}, True, 5, None),
        ({"logprobs": 5, "echo": True}, True, 5, 5),
        ({"echo": True}, False, 0, None),
        ({"prompt_logprobs": 0}, False, 0, 0),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 7, "max_tokens": 0}, True, 2, 7),
    ):
        sampling = completion(**fields).sampling()
        assert (sampling.logprobs, sampling.top_logprobs, sampling.prompt_logprobs) == (logprobs, num_top, prompt)
    assert refusal(completion, logprobs=21)[0] == "logprobs"


@pytest.mark.parametrize("body", [
    b"", b"{", b"[1]", b"3", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999, }', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
], ids=range(10))  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body"):
        read_object(body)


@pytest.mark.parametrize(("depth", "is_taken"), [(8, True), (9, False)])
def test_a_body_is_nested_so_deep_at_most(depth: int, is_taken: bool) -> None:
    body = b'{"a":' * (depth - 1) + b"[1, 2]" + b"}" * (depth - 1)
    if is_taken:
        assert read_object(body, max_depth=8)["a"]
        return
    with pytest.raises(InvalidRequest, match="at most 8 levels"):
        read_object(body, max_depth=8)


@pytest.mark.parametrize(("fields", "param"), [
    ({"stop": ["a"] * 3}, "stop"), ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias"),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"), ({"bad_words": ["a", "b", "c"]}, "bad_words"),
])  # fmt: skip
def test_longer_lists_than_the_limits_allow_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    limits = LimitSettings(max_stop_strings=2, max_listed=2, max_choices=4)
    with pytest.raises(InvalidRequest, match=r"n is 3 for 2 prompt.* 4 choices at most"):
        check_bounds(completion(prompt=["a", "b"], n=3), limits)
    with pytest.raises(InvalidRequest, match="has 3 entries; at most 2") as caught:
        check_bounds(chat(**fields), limits)
    assert caught.value.param == param


def test_an_infinite_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        parse_body(ChatRequest, b'{"model": "m", "messages": [{"role": "user", "content": ""}], "temperature": 1e999}')


def test_a_swap_names_its_source() -> None:
    swap = parse_body(SwapBody, b'{"source": {"path": "/weights"}, "in_flight": "keep", "cast": false}')
    assert (swap.source.path, swap.in_flight, swap.cast) == ("/weights", "keep", False)
    with pytest.raises(InvalidRequest, match="source is missing"):
        parse_body(SwapBody, b"{}")
    swap = parse_body(SwapBody, b'{"source": {"hub": "org/name", "revision": "v2"}, "wait_s": 30.0}')
    assert swap.request(requested_by="me").source == WeightSource(hub="org/name", revision="v2")
    assert (swap.source.hub, swap.source.revision, swap.wait_s) == ("org/name", "v2", 30.0)


@pytest.mark.parametrize(
    ("source", "param", "message"),
    [
        ({}, "source", "source must hold one of path, layers and hub"),
        ({"path": "/weights", "hub": "org/name"}, "source", "source must hold one of path, layers and hub"),
        ({"path": "/weights", "revision": "v2"}, "source.revision", "source.revision is 'v2'; only a hub has"),
    ],
)
def test_a_source_that_is_none_or_two_is_refused(source: dict[str, str], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}") as raised:
        parse_body(SwapBody, json.dumps({"source": source}).encode())
    assert raised.value.param == param


def test_every_option_of_a_swap_reaches_the_request() -> None:
    body = {
        "source": {"layers": ["/a", "/b"]},
        "in_flight": "finish",
        "pinned": "end",
        "finish_timeout_s": 5.0,
        "strategy": "rolling",
        "max_paused": 2,
        "on_failure": "rollback",
        "verify": True,
        "wait_s": 3.0,
        "idempotency_key": "k",
        "partial": True,
        "cast": True,
        "probes": {"prompts": [[1, 2]], "reference": [[-0.5]], "max_abs_difference": 0.1},
        "label": "l",
    }
    request = parse_body(SwapBody, json.dumps(body).encode()).request(requested_by="me")
    assert request.source == WeightSource(layers=("/a", "/b"))
    assert request.probes == Probes([[1, 2]], [[-0.5]], 0.1)
    sent = {name: value for name, value in body.items() if name not in ("source", "probes")}
    assert {name: getattr(request, name) for name in sent} == sent
    # No body names the version that has to be served: sessions do, of their own.
    assert {field.name for field in dataclasses.fields(request)} == {*body, "requested_by", "base_version"}


def test_every_option_of_a_rollback_reaches_the_request() -> None:
    body = {"version": 3, "in_flight": "recompute", "strategy": "rolling", "max_paused": 2, "verify": True}
    request = parse_body(RollbackBody, json.dumps(body).encode()).request(requested_by="me")
    assert {name: getattr(request, name) for name in body} == body


def test_a_pause_needs_a_lease() -> None:
    pause = parse_body(PauseBody, b'{"lease_s": 30.0, "in_flight": "finish"}').request(requested_by="me")
    assert (pause.lease_s, pause.in_flight, pause.requested_by) == (30.0, "finish", "me")
    with pytest.raises(InvalidRequest, match="lease_s is missing"):
        parse_body(PauseBody, b"{}")


# Every module of bodies is read, so that the walk finds all of them.
BODIES = [*pkgutil.iter_modules(serve_app.protocol.__path__, "serve_app.protocol.")]
for each in BODIES:
    importlib.import_module(each.name)


def kinds(base: type[RequestModel]) -> Iterator[type[RequestModel]]:
    for kind in base.__subclasses__():
        if not inspect.isabstract(kind):
            yield kind
        yield from kinds(kind)


def num_errors(model: type[RequestModel], body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


MANY = 5000
LONG_VALUES: list[Any] = [[item] * MANY for item in ({"x": 1}, "", 0.5, -1, None, [{}], [""], [0.5] * 9)]
LONG_VALUES += [{str(number): item for number in range(MANY)} for item in ({}, "", 1000, None, [])]
LONG_VALUES += [{f"x{number}": 0 for number in range(MANY)}, [[""] * MANY] * 9, [[0.5] * MANY] * 9]
FEW_ERRORS = 8


@pytest.mark.parametrize("model", sorted(set(kinds(RequestModel)), key=str), ids=lambda model: model.__name__)
def test_a_long_value_that_is_wrong_gives_few_errors(model: type[RequestModel]) -> None:
    bodies = [{field.alias or name: value} for name, field in model.model_fields.items() for value in LONG_VALUES]
    for body in [*bodies, {f"x{number}": 0 for number in range(MANY)}]:
        assert num_errors(model, body) <= FEW_ERRORS, body.keys()


def test_the_first_bad_entry_of_many_is_named() -> None:
    assert refusal(chat, messages=[{"role": "user", "content": [0] * MANY}])[0] == "messages[0].content[0]"
    assert refusal(chat, stop_token_ids=[1, "", *[""] * MANY])[0] == "stop_token_ids[1]"
    assert refusal(chat, logit_bias={str(number): 200 for number in range(MANY)})[0] == "logit_bias[0]"
    assert refusal(completion, prompt=[[1]] * MANY) == (
        "prompt", "prompt has 5000 prompts; a request may have 1024 at most, send several",
    )  # fmt: skip
    param, message = refusal(chat, **{f"x{number}": 0 for number in range(MANY)})
    assert (param, message.startswith("the body has 5002 names")) == (None, True)
