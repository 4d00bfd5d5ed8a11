import pickle
from collections.abc import Iterator

import pytest

from engine import ContextLengthExceeded, PitstopError, QueueFull, WeightsInvalid
from serve_app.protocol.errors import ERROR_RULES, NoReplica, error_body, rule_of


def tree(root: type[PitstopError]) -> Iterator[type[PitstopError]]:
    yield root
    for child in root.__subclasses__():
        # Ray makes classes of its own out of errors that crossed a process.
        if child.__module__.startswith(("engine.", "serve_app.")):
            yield from tree(child)


def test_every_error_of_the_project_is_in_the_table() -> None:
    assert set(ERROR_RULES) == set(tree(PitstopError))


@pytest.mark.parametrize("cls", list(tree(PitstopError)), ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling(cls: type[PitstopError]) -> None:
    error = cls("why")
    error.__dict__.update(dict.fromkeys(error.__dict__, "x"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "why"
    assert copy.__dict__ == error.__dict__


def test_an_unlisted_subclass_answers_like_its_base() -> None:
    class Special(QueueFull):
        pass

    assert rule_of(Special("why")).status == 429


def test_errors_have_the_shape_of_openai() -> None:
    assert error_body(ContextLengthExceeded("too long", "messages")).model_dump() == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert error_body(NoReplica("none")).error.param is None


def test_a_refused_tensor_is_the_parameter_of_its_error() -> None:
    assert error_body(WeightsInvalid("not finite", tensor="lm_head.weight")).error.param == "lm_head.weight"
