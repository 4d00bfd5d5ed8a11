"""Packed weights are a faster way to the same numbers: never to those of other weights, and nothing stays behind."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import DEADLINE_S, greedy, prompt_of, run_all, running
from tiny_models import SUPPORTED, tiny_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from engine import ContinuousBatchingManager, InvalidRequest, StagedWeights, stage_weights
from engine.fused_layers import fuse_layers
from engine.matrix_tiles import HEIGHT, IS_SUPPORTED, PANEL
from engine.packed_weights import PackedWeights, pack_weights
from engine.products import ONE_DNN_MAX_ROWS, OneDnnProducts, PanelProducts, Products, find_products
from engine.stand_ins import in_use

PROMPTS = [prompt_of(length, seed=4) for length in (3, 20, 45)]
NUM_NEW = 10


def answers(model: PreTrainedModel) -> list[list[int]]:
    return [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


def logits_of(model: PreTrainedModel, num_tokens: int = 12) -> Tensor:
    ids_1T = torch.arange(num_tokens)[None] % model.config.vocab_size
    with torch.inference_mode():
        logits: Tensor = model(ids_1T).logits
    return logits


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=dtype)


@pytest.fixture(params=[OneDnnProducts, PanelProducts])
def products(request: Any) -> Products:
    if request.param is PanelProducts and not IS_SUPPORTED:
        pytest.skip("this processor has no way of ours")
    found: Products = request.param()
    return found


def packed_of(model: PreTrainedModel, products: Products | None = None) -> PackedWeights:
    products = products or find_products()
    assert products is not None
    packed = PackedWeights(model, products)
    packed.refresh()
    return packed


def staged(model: PreTrainedModel, folder: Path, *, seed: int) -> tuple[StagedWeights, PreTrainedModel]:
    new = tiny_model("llama", seed=seed)
    new.save_pretrained(folder)
    return stage_weights(model, str(folder)), new


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family_computes_the_same(family: str, products: Products) -> None:
    model = tiny_model(family)
    packed = packed_of(model, products)
    expected = logits_of(model)
    with in_use(packed.stand_ins()):
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 2, HEIGHT, HEIGHT + 1, 32, 33, ONE_DNN_MAX_ROWS, ONE_DNN_MAX_ROWS + 1])
def test_any_number_of_rows_goes(num_tokens: int, num_threads: int, products: Products) -> None:
    torch.set_num_threads(num_threads)
    model = tiny_model("llama")
    packed = packed_of(model, products)
    expected = logits_of(model, num_tokens)
    with in_use(packed.stand_ins()):
        torch.testing.assert_close(logits_of(model, num_tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_columns", [1, PANEL - 1, PANEL, 3 * PANEL + 5])
@pytest.mark.parametrize("width", [1, 7, 512, 513, 1_700])
@pytest.mark.parametrize("num_rows", [0, 1, HEIGHT, 2 * HEIGHT + 1])
def test_layers_of_any_shape_are_multiplied(num_rows: int, width: int, num_columns: int, products: Products) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        for has_bias in (False, True):
            layer = nn.Linear(width, num_columns, bias=has_bias)
            rows = torch.randn(1, num_rows, width)
            found = products.multiply(rows, layer, products.pack(layer.weight, empty))
            torch.testing.assert_close(found, layer(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_columns", [1, PANEL, 2 * PANEL + 5])
@pytest.mark.parametrize("num_rows", [0, 1, HEIGHT + 2])
def test_a_gate_and_its_partner_are_multiplied_at_once(num_rows: int, num_columns: int, products: Products) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        gate_NK, up_NK = torch.randn(2, num_columns, 600) / 25
        rows = 3 * torch.randn(1, num_rows, 600)
        found = products.multiply_gated(rows, products.pack(gate_NK, empty), products.pack(up_NK, empty), num_columns)
        if isinstance(products, OneDnnProducts):
            assert found is None
        else:
            expected = functional.silu(rows @ gate_NK.T) * (rows @ up_NK.T)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_somebody_who_listens_to_a_layer_hears_it() -> None:
    model: Any = tiny_model("llama")
    packed = packed_of(model)
    stand_ins = fuse_layers(model, packed) + packed.stand_ins()
    heard: list[Tensor] = []
    mlp = model.model.layers[1].mlp
    mlp.up_proj.register_forward_hook(lambda *told: heard.append(told[-1]))
    with in_use(stand_ins):
        logits_of(model)
    assert len(heard) == 1


def test_the_model_is_its_owners_again_after_each_use() -> None:
    model = tiny_model("llama")
    packed = packed_of(model)
    before = [sorted(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError), in_use(packed.stand_ins()):
        raise RuntimeError
    assert [sorted(vars(module)) for module in model.modules()] == before


def test_a_layer_with_a_way_of_its_own_is_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return 2 * super().forward(rows)

    model = tiny_model("llama")
    mlp: Any = model.model.layers[0].mlp
    doubling = Doubling(64, 96, bias=False)
    doubling.load_state_dict(mlp.up_proj.state_dict())
    mlp.up_proj = doubling
    other: Any = model.model.layers[1].mlp
    other.gate_proj.forward = lambda rows: rows @ other.gate_proj.weight.T * 3
    packed = packed_of(model)
    expected = logits_of(model)
    with in_use(fuse_layers(model, packed) + packed.stand_ins()):
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
    assert "forward" in vars(other.gate_proj)


def test_a_tensor_that_took_the_place_of_a_weight_is_what_counts() -> None:
    model = tiny_model("llama")
    packed = packed_of(model)
    new = tiny_model("llama", seed=9)
    for held, spare in zip(model.parameters(), new.parameters(), strict=True):
        held.data = spare.data
    for refreshed in (False, True):
        if refreshed:
            packed.refresh()
        with in_use(packed.stand_ins()):
            torch.testing.assert_close(logits_of(model), logits_of(new), rtol=1e-4, atol=1e-4)


def test_a_swap_finds_its_copies_made(tmp_path: Path, products: Products) -> None:
    model = tiny_model("llama")
    packed = packed_of(model, products)
    weights, new = staged(model, tmp_path, seed=5)
    prepared = packed.prepare(weights.pairs)
    weights.commit()
    packed.refresh(prepared)
    assert packed._packed == prepared, "a pause would have packed weights, or the old copies are still there"
    with in_use(packed.stand_ins()):
        torch.testing.assert_close(logits_of(model), logits_of(new), rtol=1e-4, atol=1e-4)


def test_copies_of_weights_that_are_never_committed_go_with_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tiny_model("llama", seed=5).save_pretrained(tmp_path)
    with running(model, pack_weights=True) as manager:
        weights = manager.stage_weights(tmp_path)
        copies = [weakref.ref(copy.weight) for copy in weights.prepared.values()]
        assert copies
        weights.discard()
        gc.collect()
        assert [copy() for copy in copies if copy() is not None] == []


def test_tokens_are_those_of_the_weights_after_every_kind_of_change(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = tiny_model("llama")
    with running(model, pack_weights=True) as manager:
        assert run_all(manager, PROMPTS, max_new_tokens=NUM_NEW) == answers(first)
        weights, second = staged(model, tmp_path, seed=5)
        manager.commit_weights(weights)
        assert run_all(manager, PROMPTS, max_new_tokens=NUM_NEW) == answers(second)
        with manager.pause():
            weights.rollback()
        assert run_all(manager, PROMPTS, max_new_tokens=NUM_NEW) == answers(first)
        third = tiny_model("llama", seed=6)
        with manager.pause(), torch.no_grad():
            for held, other in zip(model.parameters(), third.parameters(), strict=True):
                held.data.copy_(other)
        assert run_all(manager, PROMPTS, max_new_tokens=NUM_NEW) == answers(third)
        manager.stop(timeout=DEADLINE_S)
        with torch.no_grad():
            model.load_state_dict(first.state_dict())
        manager.start()
        assert run_all(manager, PROMPTS, max_new_tokens=NUM_NEW) == answers(first)


def test_the_old_weights_are_not_kept_by_their_copies(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with running(model, pack_weights=True) as manager:
        for seed in (5, 6, 7):
            weights, _ = staged(model, tmp_path / str(seed), seed=seed)
            manager.commit_weights(weights)
            weights.discard()
        packed = manager._packed
        assert packed is not None
        held = {parameter.data_ptr() for parameter in model.parameters()}
        assert {one.source.data_ptr() for one in packed._packed.values()} <= held


def test_a_swap_whose_copies_cannot_be_made_counts_and_computes_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, new = tiny_model("llama"), tiny_model("llama", seed=5)
    new.save_pretrained(tmp_path)
    with running(model, pack_weights=True) as manager:
        staged = manager.stage_weights(tmp_path)
        packed = manager._packed
        assert packed is not None

        def refresh(_: object, *, all_of_them: bool = False) -> object:
            raise MemoryError(f"no room, all_of_them={all_of_them}")

        monkeypatch.setattr(packed, "refresh", refresh)
        manager.commit_weights(staged, version=7)
        assert manager.weight_version == 7
        assert not packed._packed
        assert run_all(manager, PROMPTS, NUM_NEW) == answers(new)


def test_copies_that_take_much_of_the_memory_are_made_when_asked_for() -> None:
    model = tiny_model("llama")
    size = packed_of(model).size_bytes
    assert pack_weights(model, wanted=None, free_bytes=4 * size) is not None
    assert pack_weights(model, wanted=None, free_bytes=4 * size - 4) is None
    assert pack_weights(model, wanted=True, free_bytes=size) is not None
    assert pack_weights(model, wanted=False, free_bytes=100 * size) is None


def test_what_cannot_be_packed_is_refused_by_name_or_left() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    assert pack_weights(model, wanted=None, free_bytes=1 << 40) is None
    with pytest.raises(InvalidRequest, match=r"pack_weights=True .* torch.bfloat16 on cpu; leave it at None"):
        pack_weights(model, wanted=True, free_bytes=1 << 40)


def test_a_manager_packs_by_itself_and_counts_the_memory() -> None:
    manager = ContinuousBatchingManager(tiny_model("llama"))
    assert manager._packed is not None
