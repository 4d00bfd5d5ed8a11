"""New weights are taken whole, or refused by name with nothing changed."""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SUPPORTED, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import WeightsError, WeightsInvalid, WeightsSourceError
from engine.weights import StagedWeights, digest_of, digest_of_all, digests_of_ranks, stage_weights
from engine.weights.folder import open_folder

UP_PROJ = "model.layers.1.mlp.up_proj.weight"
SINGLE = "model.safetensors"
IDS = torch.tensor([[3, 141, 59, 26, 53]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def snapshot(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def saved_llama(folder: Path, changes: Mapping[str, Tensor | None] | None = None) -> Path:
    """Saves a tiny Llama with some tensors replaced, added or (None) left out."""
    tiny_model("llama", seed=1).save_pretrained(folder)
    tensors: dict[str, Tensor] = load_file(folder / SINGLE)
    for name, tensor in (changes or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE)
    return folder


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_family_takes_the_folder_that_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model, other = tiny_model(family, seed=1), tiny_model(family, seed=2)
    other.save_pretrained(tmp_path)
    before = snapshot(model)
    staged = stage_weights(model, str(tmp_path))
    assert_same(model, before)
    staged.commit()
    assert_same(model, snapshot(other))
    assert torch.equal(logits_of(model), logits_of(other))
    staged.rollback()
    assert_same(model, before)


@pytest.mark.parametrize("layout", ["index", "no index", "one file"])
def test_folders_of_every_layout_are_read(layout: str, tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    other.save_pretrained(tmp_path, max_shard_size="100KB" if layout != "one file" else "1GB")
    if layout == "no index":
        (tmp_path / "model.safetensors.index.json").unlink()
    path = tmp_path / SINGLE if layout == "one file" else tmp_path
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if layout == "one file" else 4)
    staged = stage_weights(model, str(path))
    staged.commit()
    assert_same(model, snapshot(other))


def test_sizes_are_those_of_the_distinct_tensors(tmp_path: Path) -> None:
    model = tiny_model("llama_tied")
    model.save_pretrained(tmp_path)
    staged = stage_weights(model, str(tmp_path))
    parameters = list(model.parameters())
    assert staged.num_tensors == len(parameters)
    assert staged.size_bytes == sum(parameter.nbytes for parameter in parameters)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model, other = tiny_model("llama_tied", seed=1), tiny_model("llama_tied", seed=2)
    other.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    stage_weights(model, str(tmp_path)).commit()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits_of(model), logits_of(other))


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_tied_by_storage_alone_stay_tied(in_place: bool, tmp_path: Path) -> None:
    model, other = tiny_model("llama_tied", seed=1), tiny_model("llama_tied", seed=2)
    other.save_pretrained(tmp_path)
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.data)
    stage_weights(model, str(tmp_path)).commit(in_place=in_place)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits_of(model), logits_of(other))


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_source_with_both_tied_tensors_must_have_them_equal(is_equal: bool, tmp_path: Path) -> None:
    model = tiny_model("llama_tied", seed=1)
    tiny_model("llama_tied", seed=2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if is_equal else 1.0)
    save_file(tensors, tmp_path / SINGLE)
    if is_equal:
        stage_weights(model, str(tmp_path)).commit()
        assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
        return
    with pytest.raises(WeightsInvalid, match=r"tied.*lm_head.weight|lm_head.weight.*tied"):
        stage_weights(model, str(tmp_path))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "1 missing"),
        (torch.zeros(64, 96), r"of another shape.*\[64, 96\], must be \[96, 64\]"),
        (torch.zeros(96, 64, 1), "of another shape"),
        (torch.zeros(()), "of another shape"),
        (torch.zeros(96, 64, dtype=torch.bfloat16), "of another dtype.*bfloat16, must be torch.float32"),
        (torch.zeros(96, 64, dtype=torch.int32), "of another dtype"),
        (torch.full((96, 64), float("nan")), "not finite"),
        (
            torch.zeros(96, 64).index_put((torch.tensor(95), torch.tensor(63)), torch.tensor(float("-inf"))),
            "not finite",
        ),
        (torch.zeros(96, 64).index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(float("nan"))), "not finite"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    model = tiny_model()
    before = snapshot(model)
    saved_llama(tmp_path, {UP_PROJ: tensor})
    with pytest.raises(WeightsInvalid, match=message) as caught:
        stage_weights(model, str(tmp_path))
    assert UP_PROJ in str(caught.value)
    assert caught.value.tensor == UP_PROJ
    assert_same(model, before)


def test_an_extra_tensor_is_refused_by_name(tmp_path: Path) -> None:
    saved_llama(tmp_path, {"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)})
    with pytest.raises(WeightsInvalid, match=r"1 unknown to the model: model\.layers\.2\.mlp\.up_proj"):
        stage_weights(tiny_model(), str(tmp_path))


def test_many_problems_are_counted_and_a_few_named(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(WeightsInvalid, match=r"20 missing: .* and 17 more; \d+ unknown to the model: .* more"):
        stage_weights(tiny_model("llama"), str(tmp_path))


def test_another_size_of_the_same_family_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(WeightsInvalid, match="of another shape"):
        stage_weights(tiny_model("llama"), str(tmp_path))


def test_other_dtypes_are_converted_when_asked(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2).bfloat16()
    other.save_pretrained(tmp_path)
    with pytest.raises(WeightsInvalid, match="21 of another dtype"):
        stage_weights(model, str(tmp_path))
    stage_weights(model, str(tmp_path), cast=True).commit()
    assert_same(model, {name: tensor.float() for name, tensor in other.state_dict().items()})


def test_a_value_that_a_cast_makes_infinite_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    torch.nn.Module.to(model, torch.float16)
    saved_llama(tmp_path, {UP_PROJ: torch.full((96, 64), 1e6)})
    with pytest.raises(WeightsInvalid, match=f"not finite: {UP_PROJ}"):
        stage_weights(model, str(tmp_path), cast=True)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeightsInvalid, match=r"model.layers.1.mlp.experts.down_proj \(\[3, 64, 32\], must be \[4"):
        stage_weights(model, str(tmp_path))


def test_experts_that_cannot_be_stacked_are_refused(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = next(name for name in tensors if ".experts.1." in name)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeightsInvalid, match="cannot be made from"):
        stage_weights(model, str(tmp_path))


@pytest.mark.parametrize("keep", [0, 4, 8, 500, -1, -70_000])
def test_a_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    file = saved_llama(tmp_path) / SINGLE
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(WeightsSourceError, match=str(file)):
        stage_weights(tiny_model(), str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"garbage that is no header at all",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}more",
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}    ' + bytes(4),
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}    ' + bytes(4),
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}    ' + bytes(8),
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}   ' + bytes(4),
    ],
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / SINGLE
    file.write_bytes(content)
    with pytest.raises(WeightsSourceError, match=str(file)):
        stage_weights(tiny_model(), str(tmp_path))


@pytest.mark.parametrize(
    "index",
    [
        "not json",
        "{}",
        "[]",
        json.dumps({"weight_map": {"a": "absent.safetensors"}}),
        json.dumps({"weight_map": {"a": "../other.safetensors"}}),
    ],
)
def test_a_broken_index_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsSourceError, match=str(tmp_path)):
        stage_weights(tiny_model(), str(tmp_path))


@pytest.mark.parametrize("name", [SINGLE, "model.safetensors.index.json"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightsSourceError, match=f"{name} is not a regular file"):
        stage_weights(tiny_model(), str(tmp_path))


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(WeightsSourceError, match="File name too long"):
        stage_weights(tiny_model(), "/" + "x" * 4000)


def test_a_missing_or_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsSourceError, match="there is no folder /nowhere"):
        stage_weights(tiny_model(), "/nowhere")
    with pytest.raises(WeightsSourceError, match=f"{tmp_path} holds no"):
        stage_weights(tiny_model(), str(tmp_path))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(WeightsSourceError, match=r"y\.safetensors holds a, as does .*x\.safetensors"):
        stage_weights(tiny_model(), str(tmp_path))


def test_a_file_written_to_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = saved_llama(tmp_path) / SINGLE
    content = file.read_bytes()
    with pytest.raises(WeightsSourceError, match="changed while it was read"), open_folder(str(tmp_path)):
        file.write_bytes(content + b"x")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = saved_llama(tmp_path) / SINGLE
    with suppress(WeightsSourceError), open_folder(str(tmp_path)) as tensors:
        last = max(tensors.values(), key=lambda tensor: tensor.start)
        os.truncate(file, 1000)
        with pytest.raises(WeightsSourceError, match=f"ends inside tensor {last.name}"):
            last.read()


def test_staged_weights_do_not_depend_on_the_files_any_more(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    other.save_pretrained(tmp_path)
    staged = stage_weights(model, str(tmp_path))
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as writer:
        writer.write(b"\xff" * size)
    staged.commit()
    assert_same(model, snapshot(other))


def test_all_the_kinds_of_numbers_are_read(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "eight": torch.ones(3).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with open_folder(str(tmp_path)) as stored:
        assert stored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            read = stored[name].read()
            assert read.dtype == tensor.dtype
            assert torch.equal(read.double(), tensor.double())


@pytest.mark.parametrize("in_place", [False, True])
def test_rollback_and_commit_may_alternate_until_discarded(in_place: bool, tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    other.save_pretrained(tmp_path)
    old, new = snapshot(model), snapshot(other)
    staged = stage_weights(model, str(tmp_path))
    staged.rollback()
    for _ in range(2):
        staged.commit(in_place=in_place)
        assert_same(model, new)
        with pytest.raises(WeightsError, match="committed"):
            staged.commit()
        staged.rollback()
        assert_same(model, old)
    staged.commit(in_place=in_place)
    staged.discard()
    staged.rollback()
    staged.discard()
    assert_same(model, new)
    with pytest.raises(WeightsError, match="discarded"):
        staged.commit()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_commit_that_fails_half_way_changes_nothing(in_place: bool) -> None:
    held = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(3)]
    fitting = [torch.full((3,), 10.0 + i) for i in range(3)]
    # Of the right shape, dtype and device, and yet no tensor that a dense one can exchange its storage with.
    fitting[2] = fitting[2].to_sparse()
    staged = StagedWeights(zip(held, fitting, strict=True))
    with pytest.raises(RuntimeError):
        staged.commit(in_place=in_place)
    assert [parameter[0].item() for parameter in held] == [0.0, 1.0, 2.0]
    staged.rollback()
    assert [parameter[0].item() for parameter in held] == [0.0, 1.0, 2.0]


def test_a_model_that_changed_since_staging_is_not_touched(tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    tiny_model(seed=2).save_pretrained(tmp_path)
    staged = stage_weights(model, str(tmp_path))
    model.bfloat16()
    before = snapshot(model)
    with pytest.raises(WeightsError, match="stage them again"):
        staged.commit()
    assert_same(model, before)


def test_a_commit_exchanges_storages_and_copies_nothing() -> None:
    held = [torch.nn.Parameter(torch.zeros(8)) for _ in range(1000)]
    new = [torch.ones(8) for _ in held]
    StagedWeights(zip(held, new, strict=True)).commit()
    assert [parameter.data_ptr() for parameter in held] == [tensor.data_ptr() for tensor in new]


def test_a_commit_in_place_moves_no_tensor() -> None:
    held = [torch.nn.Parameter(torch.zeros(8)) for _ in range(3)]
    places = [parameter.data_ptr() for parameter in held]
    staged = StagedWeights((parameter, torch.ones(8)) for parameter in held)
    staged.commit(in_place=True)
    assert all((parameter == 1).all() for parameter in held)
    staged.rollback()
    assert all((parameter == 0).all() for parameter in held)
    assert [parameter.data_ptr() for parameter in held] == places


def test_gradients_and_training_mode_are_left_as_they_were(tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    model.train()
    tiny_model(seed=2).save_pretrained(tmp_path)
    stage_weights(model, str(tmp_path)).commit()
    assert model.training
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_staging_disturbs_no_generation_beside_it(tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    tiny_model(seed=2).save_pretrained(tmp_path)
    expected = logits_of(model)
    default_dtype, random_state = torch.get_default_dtype(), torch.get_rng_state()
    stop = threading.Event()
    worker = threading.Thread(target=_stage_until, args=(stop, model, tmp_path))
    worker.start()
    try:
        for _ in range(100):
            assert torch.equal(logits_of(model), expected)
            assert torch.empty(1).dtype == default_dtype
    finally:
        stop.set()
        worker.join()
    assert torch.equal(torch.get_rng_state(), random_state)


def _stage_until(stop: threading.Event, model: PreTrainedModel, path: Path) -> None:
    while not stop.is_set():
        stage_weights(model, str(path)).discard()


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    setattr(model, "is_quantized", True)  # noqa: B010  # an attribute that quantizers add
    with pytest.raises(WeightsInvalid, match="quantized"):
        stage_weights(model, str(tmp_path))


# Layers, parts and digests


def written(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(dict(tensors), folder / SINGLE)
    return folder


def test_a_later_layer_overrides_an_earlier_one(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    other.save_pretrained(tmp_path / "base")
    first = written(tmp_path / "first", {UP_PROJ: torch.ones(96, 64), "model.norm.weight": torch.ones(64)})
    second = written(tmp_path / "second", {UP_PROJ: torch.full((96, 64), 2.0)})
    staged = stage_weights(model, [tmp_path / "base", first, str(second)])
    staged.commit()
    expected = snapshot(other) | {UP_PROJ: torch.full((96, 64), 2.0), "model.norm.weight": torch.ones(64)}
    assert_same(model, expected)
    assert staged.unchanged == ()
    assert staged.digests == {name: digest_of(tensor) for name, tensor in expected.items()}


def test_layers_together_must_hold_everything(tmp_path: Path) -> None:
    part = written(tmp_path / "part", {UP_PROJ: torch.ones(96, 64)})
    with pytest.raises(WeightsInvalid, match="20 missing"):
        stage_weights(tiny_model(), [part])
    with pytest.raises(WeightsSourceError, match="at least one"):
        stage_weights(tiny_model(), [])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_neox"])
def test_a_layer_may_have_the_names_of_the_model_where_the_base_has_those_of_a_checkpoint(
    family: str, tmp_path: Path
) -> None:
    model, other, third = (tiny_model(family, seed=seed) for seed in (1, 2, 3))
    other.save_pretrained(tmp_path / "base")
    changed = {name: tensor.clone() for name, tensor in third.state_dict().items() if ".1." in name}
    staged = stage_weights(model, [tmp_path / "base", written(tmp_path / "delta", changed)])
    staged.commit()
    assert_same(model, snapshot(other) | changed)


def test_a_layer_may_bring_one_expert(tmp_path: Path) -> None:
    model, other = tiny_model("mixtral", seed=1), tiny_model("mixtral", seed=2)
    other.save_pretrained(tmp_path)
    name = next(name for name in load_file(tmp_path / SINGLE) if ".1." in name and "experts.2.w2" in name)
    expert = torch.full_like(load_file(tmp_path / SINGLE)[name], 0.5)
    stage_weights(model, [tmp_path, written(tmp_path / "delta", {name: expert})]).commit()
    expected = snapshot(other)
    expected["model.layers.1.mlp.experts.down_proj"][2] = expert
    assert_same(model, expected)


def test_a_layer_overrides_a_tied_tensor_under_either_name(tmp_path: Path) -> None:
    model, other = tiny_model("llama_tied", seed=1), tiny_model("llama_tied", seed=2)
    other.save_pretrained(tmp_path)
    head = torch.full_like(other.lm_head.weight.detach(), 0.25)
    staged = stage_weights(model, [tmp_path, written(tmp_path / "delta", {"lm_head.weight": head})])
    staged.commit()
    assert torch.equal(model.model.embed_tokens.weight, head)
    assert staged.digests["lm_head.weight"] == staged.digests["model.embed_tokens.weight"] == digest_of(head)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_partial_source_leaves_the_rest_and_names_it(is_tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama_tied" if is_tied else "llama", seed=1)
    before = snapshot(model)
    part = written(tmp_path / "part", {UP_PROJ: torch.ones(96, 64)})
    staged = stage_weights(model, part, partial=True)
    assert set(staged.unchanged) == before.keys() - {UP_PROJ}
    assert (staged.num_tensors, staged.num_bytes) == (1, 96 * 64 * 4)
    staged.commit()
    expected = before | {UP_PROJ: torch.ones(96, 64)}
    assert_same(model, expected)
    assert staged.digests == {name: digest_of(tensor) for name, tensor in expected.items()}


def test_a_partial_source_is_checked_as_any_other(tmp_path: Path) -> None:
    for name, tensor, message in (
        ("model.layers.9.mlp.up_proj.weight", torch.ones(96, 64), "unknown to the model"),
        (UP_PROJ, torch.ones(64, 96), "of another shape"),
        (UP_PROJ, torch.full((96, 64), float("nan")), "not finite"),
    ):
        folder = written(tmp_path / message, {name: tensor})
        with pytest.raises(WeightsInvalid, match=message):
            stage_weights(tiny_model(), folder, partial=True)


def test_digests_are_of_what_is_served_and_tell_every_difference(tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2).bfloat16()
    other.save_pretrained(tmp_path)
    staged = stage_weights(model, tmp_path, cast=True)
    staged.commit()
    assert staged.digests == {name: digest_of(tensor) for name, tensor in model.state_dict().items()}
    assert staged.digest == digest_of_all(dict(reversed(staged.digests.items())))
    one = torch.arange(12.0).reshape(3, 4)
    others = [one.reshape(4, 3), one.double(), one.view(torch.int32), one.clone().put_(torch.tensor(3), one[0, 0])]
    digests = {digest_of(tensor) for tensor in [one, *others, torch.empty(0), torch.empty(0, 2), torch.tensor(1.0)]}
    assert len(digests) == 8
    assert digest_of(one.t().contiguous().t()) == digest_of(one)


def test_digests_of_ranks_are_the_common_one_or_of_all_parts_in_order() -> None:
    first, second = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
    joined = digests_of_ranks([first, second])
    assert joined["a"] == "1"
    assert joined["b"] not in {"2", "3", digests_of_ranks([second, first])["b"]}
