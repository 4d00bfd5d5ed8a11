"""A set of checked weights beside those in use, and the exchange of the two."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from engine.errors import WeightsError
from engine.weights.digests import Contents


class _State(StrEnum):
    STAGED = "staged"
    COMMITTED = "committed"
    DISCARDED = "discarded"


class StagedWeights:
    """New storages for the tensors of one model. An exchange swaps storages: its time does not grow with their size.
    In place it copies what they hold, once, for who holds their addresses.

    Whoever calls `commit` or `rollback` holds the pause of every manager that runs the model. Tensors that shared a
    storage share the new one. Invariant: the model holds all of the one set and this object all of the other.
    """

    is_streamed = False
    """The new weights are not in memory: the commit reads them, tensor by tensor."""

    based_on: int | None = None
    """The weight version whose parameters a partial source leaves as they are; None where it leaves none."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], contents: Contents | None = None) -> None:
        """Takes pairs of a tensor of the model and the new tensor for it, of the same shape, dtype and device."""
        self._pairs = list(pairs)
        self._contents = contents or Contents()
        distinct = {id(spare): spare for _, spare in self._pairs}.values()
        self.num_tensors = len(distinct)
        self.size_bytes = sum(spare.numel() * spare.element_size() for spare in distinct)
        self._state = _State.STAGED
        self._is_in_place = False
        self._old: list[Tensor] | None = None
        self.prepared: Any = None
        """What was made of the new tensors beside generation, for whoever exchanges them; it goes with them."""
        self.old_version: int | None = None
        """The weight version that `keep_old` copied."""

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors of the model, each with the one that an exchange would give it."""
        return list(self._pairs)

    @property
    def is_committed(self) -> bool:
        """The model holds these weights, unless others were committed since."""
        return self._state is _State.COMMITTED

    @property
    def is_ready(self) -> bool:
        """They can be committed: neither committed nor discarded."""
        return self._state is _State.STAGED

    @property
    def digests(self) -> Mapping[str, str]:
        """By name in the model's state dict, a digest of each parameter as it will be served; tied names share one."""
        return self._contents.digests

    @property
    def digest(self) -> str:
        """One digest over all of them."""
        return self._contents.digest

    @property
    def unchanged(self) -> tuple[str, ...]:
        """The parameters that a partial source does not name; they keep the values they had when it was staged."""
        return self._contents.unchanged

    @property
    def num_bytes(self) -> int:
        """How many bytes of tensors were read."""
        return self._contents.num_bytes

    def keep_old(self, *, version: int | None = None) -> None:
        """Copies what a commit in place overwrites to the host, ahead of the pause; it must not change until then."""
        self._old = [held.detach().to("cpu", copy=True) for held, _ in self._distinct()]
        self.old_version = version

    def commit(self, *, in_place: bool = False) -> None:
        """Gives the model the new weights; the old ones are kept for `rollback`. On an error nothing has changed.

        in_place: the tensors of the model stay where they are in memory, as captured CUDA graphs need it. That copies
        the new values, and the old ones first, where nobody has called `keep_old`.
        """
        if self._state is not _State.STAGED:
            raise WeightsError(f"these weights are {self._state}; only staged ones can be committed")
        self._is_in_place = in_place
        self._exchange()
        self._state = _State.COMMITTED

    def rollback(self) -> None:
        """Gives the model its old weights back; nothing to do unless committed. They may be committed again."""
        if self._state is _State.COMMITTED:
            self._exchange()
            self._state = _State.STAGED

    def release_old(self) -> None:
        """Gives back what a rollback needs and no memory holds; called when a commit is final and nobody waits."""

    def discard(self) -> None:
        """Frees the weights that the model does not hold; no pause is needed. After a commit this makes it final."""
        self._pairs.clear()
        self._old = self.prepared = None
        self._state = _State.DISCARDED

    def _exchange(self) -> None:
        self._check_fit()
        if self._is_in_place:
            self._exchange_values()
        else:
            self._exchange_storages()

    def _exchange_values(self) -> None:
        if self._old is None:
            self.keep_old()
        assert self._old is not None
        new = [spare for _, spare in self._distinct()]
        taken, given = (self._old, new) if self._state is _State.COMMITTED else (new, self._old)
        done = 0
        try:
            for (held, _), value in zip(self._distinct(), taken, strict=True):
                done += 1
                _copy(held, value)
        except BaseException:
            for (held, _), value in list(zip(self._distinct(), given, strict=True))[:done]:
                _copy(held, value)
            raise

    def _distinct(self) -> list[tuple[Tensor, Tensor]]:
        """Each storage once: tensors that share one come with one spare for all of them."""
        return list({id(spare): (held, spare) for held, spare in self._pairs}.values())

    def _exchange_storages(self) -> None:
        before = [held.data for held, _ in self._pairs]
        try:
            for held, spare in self._pairs:
                held.data = spare
        except BaseException:
            for (held, _), data in zip(self._pairs, before, strict=True):
                held.data = data
            raise
        self._pairs = [(held, data) for (held, _), data in zip(self._pairs, before, strict=True)]

    def _check_fit(self) -> None:
        for held, spare in self._pairs:
            if (held.shape, held.dtype, held.device) != (spare.shape, spare.dtype, spare.device):
                raise WeightsError("the model was moved or changed after these weights were staged; stage them again")


def _copy(held: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        held.copy_(value)
