"""Text on both sides of the engine: prompts to token ids, token ids back to text, stop strings. Knows nothing of Ray.

Tokens are not characters: a character may take several tokens and a stop string may begin in the middle of one. What
comes out of here, put together, is what decoding all tokens at once gives, cut before the first stop string.
"""

import inspect
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine import ContextLengthExceeded, InvalidRequest

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 32
"""Tokens that may wait for the rest of a character: four bytes make one, a few real U+FFFD may precede."""
BEGINNING = 16
"""Characters a token of what is read of an endless text at first: few texts have tokens so long."""
OWN_TEMPLATE_VALUES = frozenset({"messages", "conversations", "self"})
"""Values that transformers gives every template itself, beside the arguments of `apply_chat_template`."""
CONTEXT_TOKENS = 4
"""Tokens kept before a forced cut: the last three bytes may begin a character, and one stands before them."""


MAX_TAIL_TOKENS = 2 * CONTEXT_TOKENS
"""Of a prompt that are looked at, which a text goes on with: one of the first four of them begins a character."""


class Tokenizer:
    """The model's tokenizer and chat template. Safe to share: after the constructor nothing is written to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {str(token): token_id for token_id, token in added.items()}
        # The first call clears the truncation a tokenizer file may ask for; later ones then change nothing.
        self.encode("a")

    @classmethod
    def load(cls, path: str, *, trust_remote_code: bool = False) -> "Tokenizer":
        """Gives the tokenizer of a local folder or hub id; raises what transformers raises."""
        return cls(AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Gives the ids of a text; raises InvalidRequest for half a surrogate pair, which no tokenizer can encode.

        max_tokens: where a text has many more than this, it raises ContextLengthExceeded after reading its beginning:
        8 MB take ten seconds. Of those with a few more it gives the ids.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text holds half a surrogate pair at character {error.start}; send whole characters", "prompt"
            ) from None
        if max_tokens is not None:
            self._refuse_endless(text, max_tokens)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def _refuse_endless(self, text: str, max_tokens: int) -> None:
        length = BEGINNING * max_tokens
        while length < len(text):
            # A cut may part a word and so change its tokens, but never make twice as many of all that stand before it.
            beginning = self._tokenizer.encode(text[:length], add_special_tokens=False, verbose=False)
            if len(beginning) > 2 * max_tokens:
                raise ContextLengthExceeded(
                    f"the prompt has {len(text)} characters, and its first {length} alone are {len(beginning)} tokens;"
                    f" prompt and answer together may be {max_tokens} tokens at most",
                    "prompt",
                )
            length *= 4

    @property
    def chat_template(self) -> str:
        """The text of the chat template, of all of them where the model has several; empty where it has none."""
        template: Any = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def added_id(self, text: str) -> int | None:
        """Gives the id of a token that was added to the vocabulary under this text, special or not."""
        return self._added.get(text)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_values: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Gives the ids of a chat up to where the assistant answers, or goes on with the last message.

        template_values: what the model's own template takes besides. max_tokens: as for `encode`.
        Raises InvalidRequest where the model has no chat template and with the message of a template that refuses.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("the model has no chat template; use /v1/completions", "messages")
        values = self._checked_values(template_values or {})
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **values,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template is a program of the model's: on input it does not expect it may fail in any of these ways.
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from None
        # The template has written the special tokens itself.
        return self.encode(str(text), add_special_tokens=False, max_tokens=max_tokens)

    def _checked_values(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        # They stand beside transformers' own arguments, which are not the client's to set.
        taken = OWN_TEMPLATE_VALUES.union(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        for name in sorted(values.keys() & taken):
            raise InvalidRequest(f"chat_template_kwargs.{name} is not the chat template's", "chat_template_kwargs")
        return values

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Gives the text of ids, exactly: no cleaning up of spaces."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Gives the token sequences of words: each as it begins a text, and after a space where that differs."""
        found: list[list[int]] = []
        for word in words:
            for text in (word.lstrip() or word, f" {word.lstrip()}"):
                ids = self.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def token_text(self, token_id: int) -> str:
        """Gives one token as log-probabilities show it: special ones by name, parts of characters as U+FFFD."""
        alone = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        if REPLACEMENT in alone:
            return alone
        # Some tokenizers drop the space before the first token, so the second of two equal ones is looked at.
        return str(self._tokenizer.decode([token_id, token_id], clean_up_tokenization_spaces=False))[len(alone) :]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Gives `token_text` of each, decoding every distinct token once."""
        texts = {token_id: self.token_text(token_id) for token_id in set(token_ids)}
        return [texts[token_id] for token_id in token_ids]

    def is_skipped(self, token_id: int) -> bool:
        """True for special tokens, which are no part of the text."""
        return token_id in self._skipped


class Detokeniser:
    """Turns tokens into text as they come. A character is held back until all its tokens are there.

    Invariant: what was given out, put together, is a prefix of the decoding of all tokens so far; after a prompt, of
    what that adds to the prompt's text, with its first space and the character that the prompt began. Each token is
    decoded a bounded number of times. The one exception is a tokenizer with byte tokens (<0xE4>): decoding everything
    at once makes U+FFFD of whole characters spelt in bytes when an incomplete one follows them, and this gave them out
    before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skips_special_tokens: bool = True,
        shown_ids: AbstractSet[int] = frozenset(),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """shown_ids: special tokens that are not skipped with the others. prompt_ids: of what the text goes on with."""
        self._tokenizer = tokenizer
        self._skips = skips_special_tokens
        self._shown = shown_ids
        # Decoding starts at tokens already given out, because how a token reads may depend on the one before it.
        self._window = self._tail(prompt_ids)
        self._prompt_text = self._decode(self._window)
        """Of the window, until something was given out."""
        self._num_read, self._whole_prompt_text = self._whole(self._window)
        self._num_emitted = len(self._prompt_text)

    def push(self, token_ids: Sequence[int]) -> str:
        """Gives the text that the new tokens complete."""
        new_ids = [token_id for token_id in token_ids if not self._is_skipped(token_id)]
        if not new_ids:
            return ""
        text = self._decode(self._window + new_ids)
        if text.endswith(REPLACEMENT) and len(new_ids) > 1:
            return "".join(self._push_one(token_id) for token_id in new_ids)
        self._window += new_ids
        return self._emit(text)

    def flush(self) -> str:
        """Gives what is still held back, at the end of the output: an incomplete character as U+FFFD."""
        text = self._decode(self._window)
        return text[self._start_in(text) :]

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """Gives the last tokens of a prompt, from where a character begins; none where it has no such place."""
        shown = (token_id for token_id in reversed(prompt_ids) if not self._is_skipped(token_id))
        tail = list(islice(shown, MAX_TAIL_TOKENS))[::-1]
        if len(tail) < MAX_TAIL_TOKENS:
            return tail
        tails = (tail[-size:] for size in range(CONTEXT_TOKENS, MAX_TAIL_TOKENS + 1))
        return next((ids for ids in tails if not (self._whole(ids)[1] or REPLACEMENT).startswith(REPLACEMENT)), [])

    def _whole(self, token_ids: list[int]) -> tuple[int, str]:
        """Gives the number and the text of tokens without those of the character that they end within."""
        # With byte tokens an incomplete character spoils those before it, so they are looked at without its bytes.
        ends = range(max(0, len(token_ids) - CONTEXT_TOKENS + 1), len(token_ids) + 1)
        texts = [(end, self._decode(token_ids[:end]).rstrip(REPLACEMENT)) for end in ends]
        return max(texts, key=lambda found: len(found[1]))

    def _start_in(self, text: str) -> int:
        """Gives where in the text of the window begins what was not given out."""
        # The new tokens may have completed a character of which the prompt had a part.
        return self._num_emitted if text.startswith(self._prompt_text) else len(self._whole_prompt_text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        # What is to be skipped is not among them any more.
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips and not self._shown)

    def _is_skipped(self, token_id: int) -> bool:
        return self._skips and token_id not in self._shown and self._tokenizer.is_skipped(token_id)

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        if text.endswith(REPLACEMENT):
            return self._emit_settled(text) if len(self._window) - self._num_read > MAX_HELD_TOKENS else ""
        new = text[self._start_in(text) :]
        if new:
            self._prompt_text = ""
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._num_emitted = len(self._decode(self._window))
        return new

    def _emit_settled(self, text: str) -> str:
        """Gives all but the last U+FFFD, the only one that may still become a character."""
        new = text[self._start_in(text) : -1]
        self._prompt_text = ""
        self._window = self._window[-CONTEXT_TOKENS:]
        self._num_read = 1
        self._num_emitted = len(self._decode(self._window)) - 1
        return new


class StopMatcher:
    """Ends a text before the first stop string to be completed; of two that end together, before the longer one.

    Text that may turn out to be the head of a stop string is held back. `found` is the string that ended the text.
    includes_stop: end it behind the string instead.
    """

    def __init__(self, stop_strings: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stop_strings = stop_strings
        self._includes_stop = includes_stop
        self._held = ""
        self._num_uncounted = 0
        """Characters at the head of `_held` that no stop string counts within."""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Gives the text that no stop string can reach any more; nothing after a stop.

        counts: False where no stop string counts that is complete by the end of this text; one may begin in it.
        """
        if self.is_stopped:
            return ""
        text = self._held + text
        if not counts:
            self._num_uncounted = len(text)
        if found := self._found_in(text):
            end, start = min(found)
            self.found, self._held = text[start:end], ""
            return text[: end if self._includes_stop else start]
        num_held = max((overlap(text, stop) for stop in self._stop_strings), default=0)
        settled = len(text) - num_held
        self._held = text[settled:]
        self._num_uncounted = max(0, self._num_uncounted - settled)
        return text[:settled]

    def flush(self) -> str:
        """Gives what was held back, at the end of an output that met no stop string."""
        held, self._held = self._held, ""
        return held

    def _found_in(self, text: str) -> list[tuple[int, int]]:
        """Gives where each stop string ends and starts that counts in a text, at its first place."""
        starts = [(stop, text.find(stop, max(0, self._num_uncounted - len(stop) + 1))) for stop in self._stop_strings]
        return [(start + len(stop), start) for stop, start in starts if start >= 0]


def overlap(text: str, stop: str) -> int:
    """Gives the length of the longest end of `text` that `stop` begins with, less than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
