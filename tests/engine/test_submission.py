from typing import Any

import numpy as np
import pytest
import torch
from test_scheduler import make_config

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.generation_defaults import GenerationDefaults
from engine.request import SamplingParams, WorkloadHints
from engine.submission import RequestFactory

DEFAULTS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, eos_token_ids=(96,))


def make_factory(**changes: object) -> RequestFactory:
    return RequestFactory(
        make_config(**changes),
        defaults=GenerationDefaults(sampling=DEFAULTS),
        accepts_keywords=bool(changes.get("keywords")),
    )


def make(ids: object, sampling: SamplingParams | None = None, **changes: object) -> list[int]:
    factory = make_factory(**changes)
    request = factory.make(ids, request_id=None, sampling=sampling or SamplingParams(), cache_salt=None)  # type: ignore[arg-type]
    return request.prompt_ids


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2]])
def test_ids_may_come_in_any_sequence_of_integers(ids: object) -> None:
    assert make(ids) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        (torch.tensor([]), "empty"),
        (None, "NoneType"),
        (7, "int"),
        (torch.tensor(7), "empty"),
        ([1, 97], r"input_ids\[1\] is 97"),
        ([-1], "is -1"),
        ([2**40], "ids of this model are 0 to 96"),
        (["a"], "must be an integer"),
        ("ab", "must be an integer"),
        ([1.5], "must be an integer"),
        ([True], "must be an integer"),
        ([None], "must be an integer"),
        ([[1, 2]], "must be an integer"),
        (torch.tensor([[1, 2]]), "must be an integer"),
    ],
)
def test_anything_else_is_refused_by_its_value(ids: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make(ids)


def test_what_can_never_fit_is_refused_and_an_open_end_takes_what_fits() -> None:
    assert make([1] * 60, SamplingParams(max_new_tokens=4))
    with pytest.raises(ContextLengthExceeded, match="60 tokens and 5 new ones"):
        make([1] * 60, SamplingParams(max_new_tokens=5))
    with pytest.raises(ContextLengthExceeded):
        make([1] * 64)
    request = make_factory().make([1] * 60, request_id=None, sampling=SamplingParams(), cache_salt=None)
    assert request.max_new_tokens == 4


@pytest.mark.parametrize("waited_s", [-0.1, float("nan"), float("inf"), "1", None])
def test_no_request_can_have_waited_for_what_is_no_time(waited_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="waited_s"):
        make_factory().make(
            [1], request_id=None, sampling=SamplingParams(), hints=WorkloadHints(waited_s=waited_s), cache_salt=None
        )


def test_the_same_parameter_twice_and_unknown_ones_are_refused_by_name() -> None:
    factory = make_factory()
    with pytest.raises(InvalidRequest, match="max_new_tokens is given twice"):
        factory.merge(SamplingParams(max_new_tokens=3), 4, None, {})
    with pytest.raises(InvalidRequest, match="min_q is not a parameter"):
        factory.merge(None, None, None, {"min_q": 0.1})
    with pytest.raises(InvalidRequest, match="temperature needs per_request_processors"):
        factory.merge(None, None, None, {"temperature": 0.5})


def test_equal_config_seeds_give_equal_request_seeds() -> None:
    def seeds(seed: int) -> list[int | None]:
        factory = make_factory(seed=seed)
        requests = [factory.make([1], request_id=None, sampling=SamplingParams(), cache_salt=None) for _ in range(3)]
        return [request.sampling.seed for request in requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": True}, "seed"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"eos_token_ids": ("a",)}, "eos_token_ids"),
    ],
)
def test_sampling_values_out_of_range_are_refused_by_name(values: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert caught.value.param == name
