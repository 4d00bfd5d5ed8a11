"""Whatever a model prefers, the answer follows the grammar; and a grammar that will not do hurts nobody."""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine import InvalidRequest, QueueFull, TokenConstraint
from serve_app.messages import Grammar, GrammarKind
from serve_app.protocol.structure import MAX_GRAMMAR_LENGTH
from serve_app.protocol.tools import Tool
from serve_app.text.grammar import NUM_THREADS, GrammarCompiler, GrammarConstraint
from serve_app.text.tool_calls import ToolStyle
from serve_app.text.tool_grammar import call_grammar

MORE_IDS = 11
"""A model may have scores for ids that its tokenizer does not know."""
TOKENIZERS = {"bytes": byte_level_tokenizer(), "pieces": byte_fallback_tokenizer()}
MAX_TOKENS = 400
NAMES = ["a", "name", "größe", "日本"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def compiler_of(tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    size, end_id = len(tokenizer) + MORE_IDS, tokenizer.eos_token_id
    return GrammarCompiler(lambda: tokenizer, vocab_size=size, end_ids=(end_id,))


COMPILERS = {name: compiler_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def allowed(constraint: TokenConstraint, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bits = bytearray(-(-(len(tokenizer) + MORE_IDS) // 32) * 4)
    constraint.fill_mask(memoryview(bits))
    return list(np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")))


def walk(
    constraint: GrammarConstraint,
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    most: int = MAX_TOKENS,
    ids: list[int] | None = None,
) -> str | None:
    """Draws tokens, into `ids`, as a model without any taste would; gives the text, or None where it was cut off."""
    ids = [] if ids is None else ids
    while not constraint.is_finished and len(ids) < most:
        token = int(rng.choice(allowed(constraint, tokenizer)))
        constraint.advance([token])
        ids.append(token)
    text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text if constraint.is_finished else None


@pytest.fixture
def finished() -> Iterator[list[str]]:
    """Takes the texts of walks that came to an end: a test whose walks were all cut off has shown nothing."""
    texts: list[str] = []
    yield texts
    assert texts


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 50)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    leaves = st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": "日本\n"}]),
        bounds.map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}),
        bounds.map(lambda pair: {"type": "number", "minimum": pair[0], "maximum": pair[1]}),
        st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
        st.sampled_from(["^[ab]{1,3}c$", "^\\d{2}-x$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.lists(st.text(max_size=6), min_size=1, max_size=4, unique=True).map(lambda words: {"enum": words}),
    )
    return st.recursive(leaves, lambda inner: st.one_of(arrays(inner), objects(inner)), max_leaves=6)


def arrays(items: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda item, least, more: {"type": "array", "items": item, "minItems": least, "maxItems": least + more},
        items,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(NAMES), values, max_size=3)
    return st.builds(
        lambda fields, required: {
            "type": "object",
            "properties": fields,
            "required": [name for name in fields if name in required],
            "additionalProperties": False,
        },
        properties,
        st.sets(st.sampled_from(NAMES)),
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas(), seed=st.integers(0, 2**32))
async def test_every_answer_that_ends_fits_its_schema(
    finished: list[str], kind: str, schema: dict[str, Any], seed: int
) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "response_format")
    constraint = await COMPILERS[kind].constraint(grammar)
    text = walk(constraint, TOKENIZERS[kind], random.Random(seed))
    if text is not None:
        finished.append(text)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("pattern", ["[a-c]{3}x?", "(ja|nein|日本)", r"\d+(\.\d{2})? €", r"a/b\/\w\s?"])
async def test_answers_match_a_regex_whole(finished: list[str], kind: str, pattern: str) -> None:
    for seed in range(10):
        constraint = await COMPILERS[kind].constraint(Grammar(GrammarKind.REGEX, pattern, "structured_outputs"))
        text = walk(constraint, TOKENIZERS[kind], random.Random(seed))
        if text is not None:
            finished.append(text)
            assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_answers_are_one_of_the_choices_and_each_may_come(kind: str) -> None:
    words = ["ja", "nein", 'quote " and \\', "zwei\nZeilen", "日本", "nei", "\x00\x01\x7f"]
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(words), "structured_outputs")
    texts = {
        walk(await COMPILERS[kind].constraint(grammar), TOKENIZERS[kind], random.Random(seed)) for seed in range(80)
    }
    assert texts == set(words)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "<" item ("," item)* ">"\nitem ::= [0-9] [a-c]?',
        'start: "<" item ("," item)* ">"\nitem: /[0-9][a-c]?/',
    ],
)
async def test_grammars_come_as_gbnf_and_as_lark(finished: list[str], text: str) -> None:
    for seed in range(10):
        constraint = await COMPILERS["bytes"].constraint(Grammar(GrammarKind.EBNF, text, "structured_outputs"))
        answer = walk(constraint, TOKENIZERS["bytes"], random.Random(seed))
        if answer is not None:
            finished.append(answer)
            assert re.fullmatch(r"<[0-9][a-c]?(,[0-9][a-c]?)*>", answer), answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r'root ::= "\u00e9\U0001F600\x41\u0022\n\u000a\\u0041"', 'é😀A"\n\n\\u0041'),
        ('root ::= a ["] "\\u0062" # it is "\\u0063\na ::=\n "a"', 'a"b'),
        ('start: "say ::= x"', "say ::= x"),
        ('start: a\na: "root ::= x"', "root ::= x"),
    ],
)
async def test_strings_of_gbnf_and_lark_are_read_as_they_are_written(text: str, answer: str) -> None:
    constraint = await COMPILERS["bytes"].constraint(Grammar(GrammarKind.EBNF, text, "structured_outputs"))
    assert walk(constraint, TOKENIZERS["bytes"], random.Random(0)) == answer


async def test_blanks_between_the_tokens_of_json_come_to_an_end() -> None:
    tokenizer = TOKENIZERS["bytes"]
    constraint = await COMPILERS["bytes"].constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "x"))
    constraint.advance(tokenizer.encode("{"))
    space = tokenizer.encode(" ")[0]
    for _ in range(32):
        assert space in allowed(constraint, tokenizer)
        constraint.advance([space])
    assert space not in allowed(constraint, tokenizer)


async def test_end_and_stop_tokens_come_when_the_grammar_is_complete_and_not_before() -> None:
    tokenizer = TOKENIZERS["bytes"]
    end, letter = tokenizer.eos_token_id, tokenizer.encode("b")[0]
    grammar = Grammar(GrammarKind.REGEX, "ab*c?", "x")
    plain = await COMPILERS["bytes"].constraint(grammar)
    stopped = await COMPILERS["bytes"].constraint(grammar, stop_token_ids=(letter,))
    endless = await COMPILERS["bytes"].constraint(grammar, end_ids=())
    assert end not in allowed(plain, tokenizer)
    for constraint in (plain, stopped, endless):
        constraint.advance(tokenizer.encode("a"))
    assert {end, letter} <= set(allowed(plain, tokenizer))
    assert end not in allowed(endless, tokenizer)
    assert letter in allowed(stopped, tokenizer)
    plain.advance([letter])
    stopped.advance([letter])
    endless.advance(tokenizer.encode("c"))
    assert (plain.is_finished, stopped.is_finished, endless.is_finished) == (False, True, True)


async def test_forks_go_their_own_ways() -> None:
    tokenizer = TOKENIZERS["bytes"]
    constraint = await COMPILERS["bytes"].constraint(Grammar(GrammarKind.REGEX, "[ab]x", "x"))
    other = constraint.fork()
    constraint.advance(tokenizer.encode("a"))
    assert allowed(constraint, tokenizer) == tokenizer.encode("x")
    assert set(allowed(other, tokenizer)) == {*tokenizer.encode("a"), *tokenizer.encode("b")}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "strin"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}', '"not"'),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "roman"}', "roman"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://somewhere.example/schema"}', "somewhere.example"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', ""),
        (GrammarKind.JSON_SCHEMA, json.dumps(nested(300)), "recursion"),
        (GrammarKind.JSON_SCHEMA, "not json", ""),
        (GrammarKind.JSON_SCHEMA, "[1]", ""),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps({"allOf": [{"anyOf": [{"required": [f"{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}),
            "",
        ),
        (GrammarKind.REGEX, "([", "regex"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.REGEX, "a\\", "lone backslash"),
        (GrammarKind.REGEX, "a\\\\\\", "lone backslash"),
        (GrammarKind.REGEX, "\ud800", "surrogate"),
        (GrammarKind.JSON_SCHEMA, '{"const": "\ud800"}', "surrogate"),
        (GrammarKind.JSON_SCHEMA, '{"properties": {"\udc00": {}}}', "surrogate"),
        (GrammarKind.LARK, 'start: %json {"title": "\ud800"}', "surrogate"),
        (GrammarKind.REGEX, "(a{1000}){1000}", ""),
        (GrammarKind.EBNF, 'start: "a"{1000000000}', ""),
        (GrammarKind.CHOICE, json.dumps([TOKENIZERS["bytes"].eos_token]), "no token may follow"),
        (GrammarKind.EBNF, f'start: {TOKENIZERS["bytes"].eos_token} "a"', "no token may follow"),
        (GrammarKind.EBNF, f'start: "a" {TOKENIZERS["bytes"].eos_token}', "no token may follow"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "leads to itself"),
        (GrammarKind.REGEX, r"[^\s\S]", "nothing matches"),
        (GrammarKind.EBNF, 'root ::= "a\\', "ends inside a string"),
        (GrammarKind.EBNF, "root ::= (", "Expected"),
        (GrammarKind.EBNF, 'x ::= "a"', "root"),
        (GrammarKind.EBNF, "start: missing", "missing"),
        (GrammarKind.EBNF, "root ::= " + "(" * 5000, ""),
    ],
)
async def test_a_bad_grammar_is_refused_in_the_name_of_its_parameter(
    kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format is refused: ") as refusal:
        await COMPILERS["bytes"].constraint(Grammar(kind, text, "response_format"))
    assert refusal.value.param == "response_format"
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def grammar_of_tools(schemas: list[dict[str, Any]]) -> Grammar:
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}})
        for i, schema in enumerate(schemas)
    ]
    return call_grammar(tools, ToolStyle.HERMES, is_required=True, is_parallel=True, token_of=lambda _: None)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"a": {"type": "strin"}}, "strin"),
        ({"a": {"multipleOf": 100_003}}, "multipleOf"),
        ({"a": {"description": "\nargs_9: %json {", "pattern": "("}}, ""),
    ],
)
async def test_a_refusal_names_the_tool_whose_schema_is_bad(broken: dict[str, Any], message: str) -> None:
    grammar = grammar_of_tools([SCHEMA, {"type": "object", "properties": broken}, SCHEMA])
    with pytest.raises(InvalidRequest, match=r"^tools is refused: parameters of tool_1: ") as refusal:
        await COMPILERS["bytes"].constraint(grammar)
    assert refusal.value.param == "tools"
    assert message in str(refusal.value)


async def test_a_refusal_names_no_tool_where_all_are_too_much_together() -> None:
    schema = {"type": "object", "properties": {"a": {"multipleOf": 60_000}}}
    grammar = grammar_of_tools([schema, schema])
    with pytest.raises(InvalidRequest, match=r"^tools is refused: its values of multipleOf"):
        await COMPILERS["bytes"].constraint(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {i}" for i in range(5000)]},
        {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
        {"type": "string", "pattern": "^((x{1,100}y?){1,100}z){1,100}$"},
        {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
        {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
    ],
)
async def test_a_costly_grammar_is_compiled_or_refused_and_the_next_request_is_served(schema: dict[str, Any]) -> None:
    compiler = COMPILERS["bytes"]
    with suppress(InvalidRequest, ValueError):
        constraint = await compiler.constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "x"))
        walk(constraint, TOKENIZERS["bytes"], random.Random(0), most=50)
    text = walk(
        await compiler.constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "x")),
        TOKENIZERS["bytes"],
        random.Random(1),
    )
    assert text is None or "a" in json.loads(text)


def chain(rule: str, last: str, links: int, join: str = "\n") -> str:
    return join.join([rule % (i, i + 1) for i in range(links)] + [last % links])


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (
            GrammarKind.JSON_SCHEMA,
            chain('"a%d":{"$ref":"#/$defs/a%d"}', '"a%d":{"const":7}', 2400, ",").join(
                ['{"$ref":"#/$defs/a0","$defs":{', "}}"]
            ),
            "7",
        ),
        (
            GrammarKind.JSON_SCHEMA,
            chain('"a%d":{"items":{"$ref":"#/$defs/a%d"}}', '"a%d":{"const":7}', 1500, ",").join(
                ['{"$ref":"#/$defs/a0","$defs":{', "}}"]
            ),
            None,
        ),
        (GrammarKind.EBNF, "start: r0\n" + chain("r%d:r%d", 'r%d:"a"', 8000), "a"),
        (GrammarKind.EBNF, "start: R0\n" + chain("R%d:R%d", 'R%d:"a"', 8000), "a"),
        (GrammarKind.EBNF, "start: r0\n" + chain('r%d:r%d "b"|"c"', 'r%d:"a"', 5000), None),
        (GrammarKind.EBNF, "root ::= r0\n" + chain("r%d ::= r%d", 'r%d ::= "a"', 3000), "a"),
    ],
    ids=["refs", "items", "rules", "terminals", "choices", "gbnf"],
)
async def test_rules_that_lead_to_rules_by_the_thousand_end_no_process(
    kind: GrammarKind, text: str, answer: str | None
) -> None:
    """Where the library overflowed its stack, no Python code could catch it: this test run would be over."""
    assert len(text) <= MAX_GRAMMAR_LENGTH
    constraint = await COMPILERS["bytes"].constraint(Grammar(kind, text, "x"))
    if answer is not None:
        assert walk(constraint, TOKENIZERS["bytes"], random.Random(0), most=20) == answer
    else:
        assert allowed(constraint, TOKENIZERS["bytes"])


def steps(*values: float) -> dict[str, Any]:
    fields = {f"p{i}": {"type": "number", "multipleOf": value} for i, value in enumerate(values)}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.JSON_SCHEMA, json.dumps(steps(*[300_007] * 12)), "come to 3.60008e+06 in all; at most 100000"),
        (GrammarKind.JSON_SCHEMA, json.dumps(steps(99_999.9)), "come to 999999 in all"),
        (GrammarKind.JSON_SCHEMA, '{"multipleOf": 1e400}', "come to 1e+09 in all"),
        (GrammarKind.JSON_SCHEMA, '{"items": {"anyOf": [{"multipleOf": 2}, {"multipleOf": 100001}]}}', "100003 in all"),
        (GrammarKind.JSON_SCHEMA, '{"$defs": {"properties": {"multipleOf": -200000}}}', "200000 in all"),
        (GrammarKind.JSON_SCHEMA, '{"allOf": [{"multipleOf": 311}, {"multipleOf": 313}]}', "97343 as least common"),
        (GrammarKind.EBNF, r'start: %json {"multipl\u0065Of": 200000}', "200000 in all"),
        (GrammarKind.LARK, 'start: a | b\na: %json {"const": 1}\nb: %json {"multipleOf": 200000}', "200000 in all"),
    ],
)
async def test_multiples_that_would_take_all_memory_are_refused(kind: GrammarKind, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^x is refused: its values of multipleOf, without") as refusal:
        await COMPILERS["bytes"].constraint(Grammar(kind, text, "x"))
    assert message in str(refusal.value)


PATTERNS = [{"type": "string", "pattern": f"x{i}.*y{i}"} for i in range(40)]
CHAINED = json.dumps(
    {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {**one, "$ref": f"#/$defs/a{i + 1}"} for i, one in enumerate(PATTERNS[:30])}
        | {"a30": PATTERNS[30]},
    }
)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.JSON_SCHEMA, json.dumps({"allOf": PATTERNS}), "40 patterns beside an allOf"),
        (
            GrammarKind.JSON_SCHEMA,
            CHAINED,
            "31 patterns",
        ),
        (GrammarKind.LARK, f"start: %json {CHAINED}", "31 patterns"),
        (GrammarKind.EBNF, "start: A\nA: " + " & ".join(f"/.*x{i}.*y/" for i in range(22)), "by 21 signs of &"),
    ],
)
async def test_patterns_that_would_take_hours_together_are_refused(kind: GrammarKind, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^x is refused: it ") as refusal:
        await COMPILERS["bytes"].constraint(Grammar(kind, text, "x"))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(PATTERNS)}},
        {"anyOf": [{"type": "array", "items": one} for one in PATTERNS]},
        steps(0.01, 0.5, 5, 60, 1000, 0.00001, 1e-9),
        {"const": {"multipleOf": 300_007}},
        {"enum": [{"multipleOf": 300_007}], "default": {"multipleOf": 300_007}},
        {"type": "object", "properties": {"multipleOf": {"const": 300_007}}, "required": ["multipleOf"]},
    ],
)
async def test_usual_multiples_are_taken_and_what_only_bears_the_name(schema: dict[str, Any]) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "x")
    assert allowed(await COMPILERS["bytes"].constraint(grammar), TOKENIZERS["bytes"])


async def test_a_slow_grammar_holds_up_no_others() -> None:
    compiler, release = compiler_of(TOKENIZERS["bytes"]), threading.Event()
    for _ in range(NUM_THREADS - 1):
        compiler._threads.submit(release.wait)
    try:
        for number in range(8):
            assert await compiler.constraint(Grammar(GrammarKind.REGEX, f"a{number}", "response_format"))
    finally:
        release.set()


async def test_a_grammar_behind_slow_ones_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.text.grammar.COMPILE_TIMEOUT_S", 0.05)
    compiler, release = compiler_of(TOKENIZERS["bytes"]), threading.Event()
    compiler._tokenizer = compiler._library_tokenizer("x")
    for _ in range(NUM_THREADS):
        compiler._threads.submit(release.wait)
    try:
        with pytest.raises(QueueFull, match=r"^response_format waits behind slower grammars; try again"):
            await compiler.constraint(Grammar(GrammarKind.REGEX, "a", "response_format"))
    finally:
        release.set()


async def test_a_tokenizer_without_a_fast_form_is_refused() -> None:
    class Slow(PreTrainedTokenizerBase):
        def __init__(self) -> None:
            pass

    compiler = GrammarCompiler(Slow, vocab_size=10, end_ids=())
    with pytest.raises(InvalidRequest, match="needs a fast tokenizer, and this model has a Slow"):
        await compiler.constraint(Grammar(GrammarKind.REGEX, "a", "structured_outputs"))


async def test_kept_grammars_are_bounded_and_one_that_failed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.text.grammar.MAX_KEPT", 3)
    tokenizer: PreTrainedTokenizerFast = TOKENIZERS["bytes"]
    compiler = compiler_of(tokenizer)
    for number in range(5):
        constraint = await compiler.constraint(Grammar(GrammarKind.REGEX, f"a{number}", "x"))
    assert len(compiler._compiled) == 3
    with pytest.raises(ValueError, match="doesn't satisfy"):
        constraint.advance(tokenizer.encode("b"))
    assert len(compiler._compiled) == 2
