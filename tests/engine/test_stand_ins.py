"""What the owner of a model does to its modules between steps is what the next steps compute with."""

import types
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from engine_runs import DEADLINE_S, greedy, prompt_of, run_all, running, small_config
from tiny_models import tiny_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, prune
from transformers import PreTrainedModel

from engine import init_continuous_batching
from engine.stand_ins import has_own_forward, in_use

NUM_NEW = 8
PROMPTS = [prompt_of(length, seed=6) for length in (7, 40)]
OTHER = tiny_model(seed=9)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


def answers(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


def replace(path: str) -> Callable[[Any], None]:
    def change(model: PreTrainedModel) -> None:
        for number in range(2):
            name = f"model.layers.{number}.{path}"
            model.set_submodule(name, OTHER.get_submodule(name))

    return change


def for_each_layer(act: Callable[[Any], object]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            act(layer)

    return change


def own_forward(module: Any) -> None:
    module.forward = types.MethodType(
        lambda self, *args, **named: -2 * type(self).forward(self, *args, **named), module
    )


def listen(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, out: out * -1.5)


def add_bias(module: nn.Module) -> None:
    module.bias = nn.Parameter(torch.full((module.out_features,), 0.5))  # type: ignore[arg-type]


CHANGES = {
    **{f"another {path}": replace(path) for path in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")},
    **{f"another {path}": replace(path) for path in ("input_layernorm", "mlp", "self_attn")},
    "another layer": lambda model: model.model.layers.__setitem__(1, OTHER.get_submodule("model.layers.1")),
    "another activation": for_each_layer(lambda layer: setattr(layer.mlp, "act_fn", nn.GELU())),
    "own forward of an mlp": for_each_layer(lambda layer: own_forward(layer.mlp)),
    "own forward of a product": for_each_layer(lambda layer: own_forward(layer.self_attn.q_proj)),
    "own forward of a norm": for_each_layer(lambda layer: own_forward(layer.input_layernorm)),
    "a bias of a gate": for_each_layer(lambda layer: add_bias(layer.mlp.gate_proj)),
    "a bias of a query": for_each_layer(lambda layer: add_bias(layer.self_attn.q_proj)),
    "an epsilon": for_each_layer(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5)),
    "a scale": for_each_layer(lambda layer: setattr(layer.self_attn, "scaling", 0.6)),
    "normed weights": for_each_layer(lambda layer: parametrizations.weight_norm(layer.self_attn.q_proj, dim=None)),
    "pruned weights": for_each_layer(lambda layer: prune.random_unstructured(layer.mlp.up_proj, "weight", amount=0.3)),
    "a hook of an activation": for_each_layer(lambda layer: listen(layer.mlp.act_fn)),
    "a hook of a product": for_each_layer(lambda layer: listen(layer.mlp.gate_proj)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_that_are_changed_in_a_pause_compute_as_changed(name: str, model: PreTrainedModel) -> None:
    before = answers(model)
    with running(model) as manager:
        assert run_all(manager, PROMPTS, NUM_NEW) == before
        with manager.pause():
            CHANGES[name](model)
            own = [module for module in model.modules() if has_own_forward(module)]
            expected = answers(model)
        assert run_all(manager, PROMPTS, NUM_NEW) == expected
    assert [module for module in model.modules() if has_own_forward(module)] == own
    assert answers(model) == expected


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["another mlp", "own forward of an mlp", "a hook of an activation", "a scale"])
def test_modules_that_are_changed_between_sessions_compute_as_changed(
    name: str, keep: bool, model: PreTrainedModel
) -> None:
    manager = init_continuous_batching(model, continuous_batching_config=small_config())
    manager.start()
    run_all(manager, PROMPTS, NUM_NEW)
    manager.stop(timeout=DEADLINE_S, keep_for_next_session=keep)
    CHANGES[name](model)
    expected = answers(model)
    manager.start()
    assert run_all(manager, PROMPTS, NUM_NEW) == expected
    manager.stop(timeout=DEADLINE_S)


def test_a_change_that_is_taken_back_gives_the_fast_way_back(model: PreTrainedModel) -> None:
    before = answers(model)
    with running(model) as manager:
        chosen = manager._runner._stand_ins
        with manager.pause():
            model.train()
            hooks = [
                layer.mlp.act_fn.register_forward_hook(lambda _module, _args, out: -out) for layer in model.model.layers
            ]
        assert len(manager._runner._stand_ins) <= len(chosen)
        with manager.pause():
            for hook in hooks:
                hook.remove()
        assert [module for module, _ in manager._runner._stand_ins] == [module for module, _ in chosen]
        again = manager._runner._stand_ins
        with manager.pause():
            model.train()
        assert manager._runner._stand_ins is again
        assert run_all(manager, PROMPTS, NUM_NEW) == before


@pytest.mark.parametrize("when", ["before", "in a pause"])
@pytest.mark.parametrize("is_before_forward", [True, False])
def test_hooks_of_all_modules_are_called(when: str, is_before_forward: bool, model: PreTrainedModel) -> None:
    def turn(module: nn.Module, *values: Any) -> Any:
        is_meant = isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation"
        if not is_meant:
            return None
        return (values[0][0] * -1.5,) if is_before_forward else values[1] * -1.5

    register: Any = register_module_forward_pre_hook if is_before_forward else register_module_forward_hook
    plain = answers(model)
    with ExitStack() as stack:
        if when == "before":
            hook = register(turn)
        manager = stack.enter_context(running(model))
        if when != "before":
            with manager.pause():
                hook = register(turn)
        try:
            found = run_all(manager, PROMPTS, NUM_NEW)
            with manager.pause():
                expected = answers(model)
        finally:
            hook.remove()
    assert found == expected != plain


def test_only_what_was_put_in_is_taken_out() -> None:
    plain, own, replaced = nn.Identity(), nn.Identity(), nn.Identity()

    def theirs(_: torch.Tensor) -> str:
        return "theirs"

    own.forward = theirs
    with suppress(ZeroDivisionError), in_use([(module, lambda _: "ours") for module in (plain, own, replaced)]):
        replaced.forward = theirs
        assert [module(torch.ones(1)) for module in (plain, own, replaced)] == ["ours", "theirs", "theirs"]
        raise ZeroDivisionError
    assert [has_own_forward(module) for module in (plain, own, replaced)] == [False, True, True]
