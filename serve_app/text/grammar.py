"""Grammars of requests, compiled to the engine's constraints in threads of their own. Knows nothing of Ray.

llguidance, not xgrammar: with 49,152 tokens and one thread it compiled a usual schema in 2 ms (xgrammar in 11), an enum
of 10,000 words in 40 ms (3,100) and nested repetitions in 0.4 ms (not within 20 s); a mask takes 0.03 ms (0.01). It
bounds by itself what a grammar may cost, is under the MIT licence and needs no other package (triton).
"""

import asyncio
import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine import InvalidRequest, QueueFull
from serve_app.messages import Grammar, GrammarKind
from serve_app.text.grammar_cost import check_cost

MAX_KEPT = 64
"""Compiled grammars; with the limits below one takes a few megabytes at most."""
COMPILE_TIMEOUT_S = 5.0
"""A hundred times what the largest grammar within the limits takes; the queue before the compiler counts as well."""
NUM_THREADS = 4
"""Grammars compiled at once: one that is slow to refuse holds up no others, and three more may come."""
STACK_BYTES = 512 * 2**20
"""Of a compiler's thread, reserved and taken as it is used: the library recurses into rules that lead to rules, about
5 kB for each of up to 16,000 in a text, and an overflow would kill the process. Using a grammar does not recurse."""
MAX_REASON_LENGTH = 300
"""Characters of the compiler's own words that a client is told; it quotes the grammar."""
TRIED_TOKENS = 3
"""Of a trial output before a grammar is taken: some are too costly only after the first token."""
WHITESPACE = r"[ \n]{0,32}"
"""Between the tokens of JSON: enough for any indentation, and no endless blanks from a model that knows no better."""
_GBNF_RULE = re.compile(r"(?:^|[\r\n])[ \t]*[\w-]+[ \t]*::=")
"""How rules are written in GBNF, as of llama.cpp and xgrammar; Lark has ":", and "::=" in strings only."""
_GBNF_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*', re.DOTALL)
"""A string, a class of characters or a comment: a quote in the last two begins no string."""
_SCHEMA_LINE = re.compile(r"^\w+: %json (\{.*)$", re.MULTILINE)
_NUMBERED = re.compile(r"\\(?:u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|x(?P<x>[0-9a-fA-F]{2})|.)", re.DOTALL)
LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False)
"""Beside the library's own of what compiling (20 ms) and one mask (14 ms) may take: 40 MB of states."""


class GrammarConstraint:
    """The state of one output under a grammar: the engine's `TokenConstraint`.

    end_ids: tokens that end the output. They may come when the grammar is complete, and never before.
    """

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], own_end: int, on_error: Callable[[], None]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._own_end = own_end
        self._on_error = on_error
        self._has_ended = False

    def fill_mask(self, mask: memoryview) -> None:
        mask[:] = self._matcher.compute_bitmask()[: mask.nbytes]
        self._check()
        mask[self._own_end // 8] &= ~(1 << self._own_end % 8)
        may_end = self._matcher.is_accepting()
        for token in self._end_ids:
            # A stop token may be one of the text's own.
            byte, bit = token // 8, 1 << token % 8
            mask[byte] = mask[byte] | bit if may_end else mask[byte] & ~bit

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token in self._end_ids:
                self._has_ended = True
            else:
                self._matcher.consume_token(token)
                self._check()

    @property
    def is_finished(self) -> bool:
        return self._has_ended or self._matcher.is_stopped()

    def fork(self) -> "GrammarConstraint":
        return GrammarConstraint(self._matcher.deep_copy(), self._end_ids, self._own_end, self._on_error)

    def _check(self) -> None:
        if self._matcher.is_error():
            self._on_error()
            raise ValueError(_one_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles for one model. `constraint` belongs to one event loop, the rest to the compiler's threads.

    load_tokenizer: gives the model's tokenizer; called once, in a thread, for the first grammar.
    vocab_size: the engine's. end_ids: what ends an output unless the request says otherwise.
    """

    def __init__(
        self, load_tokenizer: Callable[[], PreTrainedTokenizerBase], *, vocab_size: int, end_ids: Sequence[int]
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        # Spelt out, or the library guesses one.
        self._own_end = self._end_ids[0] if self._end_ids else vocab_size - 1
        self._threads = _deep_threads()
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    async def constraint(
        self, grammar: Grammar, *, end_ids: Sequence[int] | None = None, stop_token_ids: Sequence[int] = ()
    ) -> GrammarConstraint:
        """Gives the constraint of a new output. end_ids: None means the model's.

        Raises InvalidRequest, in the name of the parameter that the grammar came from, for one that is wrong, not
        supported or too costly, and for a tokenizer that grammars cannot be compiled for. Raises QueueFull where the
        compiler was busy with others all the time.
        """
        digest = _digest(grammar)
        ends = frozenset(self._end_ids if end_ids is None else end_ids).union(stop_token_ids)
        matcher = self._compiled.get(digest)
        if matcher is None:
            matcher = await self._compile_beside(grammar, digest)
        else:
            self._compiled.move_to_end(digest)
        forget = _Forget(self._compiled, digest)
        return GrammarConstraint(matcher.deep_copy(), ends, self._own_end, forget)

    async def _compile_beside(self, grammar: Grammar, digest: bytes) -> LLMatcher:
        has_begun = threading.Event()
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self._compile, grammar, has_begun)
        try:
            matcher = await asyncio.wait_for(compiling, COMPILE_TIMEOUT_S + (self._tokenizer is None) * 60)
        except TimeoutError:
            if not has_begun.is_set():
                raise QueueFull(f"{grammar.param} waits behind slower grammars; try again in a few seconds") from None
            raise InvalidRequest(
                f"{grammar.param} was not compiled within {COMPILE_TIMEOUT_S:g} s; make it simpler, or try again",
                grammar.param,
            ) from None
        self._compiled[digest] = matcher
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar, has_begun: threading.Event) -> LLMatcher:
        has_begun.set()
        tokenizer = self._library_tokenizer(grammar.param)
        try:
            return self._matcher(grammar, tokenizer)
        except ValueError as refusal:
            reason = self._refused_schema(grammar, tokenizer) or str(refusal)
            raise InvalidRequest(f"{grammar.param} is refused: {reason}", grammar.param) from None

    def _matcher(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        """Raises ValueError with the reason where the grammar is wrong or too costly."""
        try:
            check_cost(grammar)
            matcher = LLMatcher(tokenizer, _in_library_terms(grammar), log_level=0, limits=LIMITS)
            trial = matcher.deep_copy()
            if not trial.is_error():
                # Some faults show at the first mask only: a reference to itself, say.
                _try_out(trial, self._own_end)
            reason = trial.get_error()
        except Exception as error:  # noqa: BLE001  # the converter of GBNF raises bare ones
            # The converter of GBNF reads on behind the end of a text that stops inside a string.
            reason = "the grammar ends inside a string" if isinstance(error, IndexError) else str(error)
            reason = reason or type(error).__name__
        if "NoExtensionBias" in reason:
            reason = "no answer can ever be complete under it: a rule or reference leads to itself, or nothing matches"
        if reason:
            raise ValueError(_one_line(reason))
        return matcher

    def _refused_schema(self, grammar: Grammar, tokenizer: LLTokenizer) -> str | None:
        """Gives which of its schemas is refused by itself, the first of them, and why."""
        for name, text in zip(grammar.schemas, _SCHEMA_LINE.findall(grammar.text), strict=bool(grammar.schemas)):
            try:
                self._matcher(Grammar(GrammarKind.JSON_SCHEMA, text, grammar.param), tokenizer)
            except ValueError as refusal:
                return f"{name}: {refusal}"
        return None

    def _library_tokenizer(self, param: str) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                tokenizer = self._load_tokenizer()
                if not isinstance(tokenizer, PreTrainedTokenizerFast):
                    raise InvalidRequest(
                        f"{param} needs a fast tokenizer, and this model has a {type(tokenizer).__name__}", param
                    )
                size = max(self._vocab_size, len(tokenizer))
                self._tokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=self._own_end)
            return self._tokenizer


class _Forget:
    """Drops a compiled grammar whose lexer, which all its outputs share, has come to a limit."""

    def __init__(self, compiled: OrderedDict[bytes, LLMatcher], digest: bytes) -> None:
        self._compiled = compiled
        self._digest = digest

    def __call__(self) -> None:
        self._compiled.pop(self._digest, None)


def _deep_threads() -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="pitstop-grammars")
    # Set for the whole process: a thread that another one starts just now reserves as much, which costs it nothing.
    usual = threading.stack_size(STACK_BYTES)
    try:
        # The executor starts a thread where none is idle: so none may be before all have begun.
        all_begun = threading.Barrier(NUM_THREADS)
        for _ in range(NUM_THREADS):
            executor.submit(all_begun.wait)
    finally:
        threading.stack_size(usual)
    return executor


def _try_out(trial: LLMatcher, own_end: int) -> None:
    """Takes the first tokens as some output might; raises ValueError where none may come though more has to."""
    for _ in range(TRIED_TOKENS):
        mask = bytearray(trial.compute_bitmask())
        if trial.is_error() or trial.is_accepting():
            return
        mask[own_end // 8] &= ~(1 << own_end % 8)
        allowed = next((8 * i + (byte & -byte).bit_length() - 1 for i, byte in enumerate(mask) if byte), None)
        if allowed is None:
            raise ValueError("it comes to where no token may follow; the token that ends an answer cannot be in it")
        trial.consume_token(allowed)


def _in_library_terms(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE})
    if grammar.kind is GrammarKind.REGEX:
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
            raise ValueError("the regex ends in a lone backslash; write two for the character itself")
        # "\d" and its like mean ASCII, as they do to JSON schemas and to the peers.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dws')}/")
    if grammar.kind is GrammarKind.CHOICE:
        # The library takes no bare DEL in a text, which JSON does not escape.
        words = (json.dumps(word, ensure_ascii=False).replace("\x7f", "\\u007f") for word in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(words))
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.text)
    is_gbnf = _GBNF_RULE.search(grammar.text) is not None
    return LLMatcher.grammar_from_lark(gbnf_to_lark(_plain_strings(grammar.text)) if is_gbnf else grammar.text)


def _plain_strings(gbnf: str) -> str:
    """Writes the characters of a GBNF text's strings as themselves where the converter's escapes are not Lark's."""
    return _GBNF_TOKEN.sub(lambda token: _NUMBERED.sub(_character, token[0]) if token[0][0] == '"' else token[0], gbnf)


def _character(escape: re.Match[str]) -> str:
    digits = escape["u"] or escape["U"] or escape["x"]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character; write one up to \\U0010FFFF that is no half of a pair")
    # Lark's strings are JSON's: no control character but as an escape.
    return json.dumps(chr(code))[1:-1] if code < 0x20 or code in (0x22, 0x5C) else chr(code)


def _digest(grammar: Grammar) -> bytes:
    try:
        text = f"{grammar.kind}\0{grammar.text}".encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{grammar.param} is refused: it holds half of a surrogate pair, which is no character", grammar.param
        ) from None
    return blake2b(text, digest_size=16).digest()


def _one_line(reason: str) -> str:
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[:MAX_REASON_LENGTH]}..."
