"""Ends a request with the token that completes one of its stop strings, as `generate` does."""

import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from engine.active_request import ActiveRequest
from engine.errors import InvalidRequest

_NUM_KEPT = 32
"""Sets of stop strings whose tables are kept; to make one goes through the whole vocabulary and takes a second."""


class StopStrings:
    """The criteria of the requests in flight. `prepare` is thread-safe, `complete` belongs to the loop's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._criteria: WeakKeyDictionary[ActiveRequest, StopStringCriteria] = WeakKeyDictionary()
        self._kept: OrderedDict[tuple[int, tuple[str, ...]], tuple[object, StopStringCriteria]] = OrderedDict()

    def prepare(self, request: ActiveRequest, tokenizer: object) -> None:
        """Makes ready what `complete` needs, in the thread that submits. Raises InvalidRequest."""
        strings = tuple(request.sampling.stop_strings or ())
        if not strings:
            return
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise InvalidRequest(
                f"stop_strings need the tokenizer of the model, not {tokenizer!r}; give it as tokenizer=",
                "stop_strings",
            )
        with self._lock:
            self._criteria[request] = self._criterion(strings, tokenizer)

    def complete(self, request: ActiveRequest, token: int) -> bool:
        """True when `token`, drawn after the tokens of the request, completes one of its stop strings."""
        criterion = self._criteria[request]
        num_before = criterion.maximum_token_len - 1
        tail = [*request.token_ids[len(request.token_ids) - min(num_before, len(request.token_ids)) :], token]
        return bool(criterion(torch.tensor([tail]), None))

    def _criterion(self, strings: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> StopStringCriteria:
        # The tokenizer is kept with its table, so that its id stays its own.
        key = (id(tokenizer), strings)
        if key not in self._kept:
            try:
                self._kept[key] = (tokenizer, StopStringCriteria(tokenizer, list(strings)))
            except ValueError as error:
                raise InvalidRequest(f"stop_strings are {list(strings)}; {error}", "stop_strings") from error
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]
