"""What is checked without a replica is what a replica would get."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SUPPORTED, tiny_model

from engine import WeightsInvalid, WeightsSourceError, check_weights, load_model, stage_weights

SINGLE = "model.safetensors"


@pytest.mark.parametrize("family", SUPPORTED)
def test_digests_are_those_of_a_replica(family: str, tmp_path: Path) -> None:
    tiny_model(family, seed=1).save_pretrained(tmp_path / "base")
    tiny_model(family, seed=2).save_pretrained(tmp_path / "new")
    default_dtype = torch.get_default_dtype()
    for dtype in ("auto", "bfloat16", "float16"):
        replica = load_model(str(tmp_path / "base"), dtype=dtype, device="cpu")
        staged = stage_weights(replica, tmp_path / "new", cast=True)
        checked = check_weights(tmp_path / "base", tmp_path / "new", dtype=dtype, cast=True)
        assert checked.digests == staged.digests
        assert (checked.digest, checked.num_bytes) == (staged.digest, staged.num_bytes)
    assert torch.get_default_dtype() == default_dtype


def test_a_source_is_checked_as_a_replica_checks_it(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        (tensors[name].T.contiguous(), "of another shape"),
        (tensors[name].double(), "of another dtype"),
        (torch.full_like(tensors[name], float("inf")), "not finite"),
        (None, "1 missing"),
    ):
        folder = tmp_path / message
        folder.mkdir()
        changed = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(changed if change is None else changed | {name: change}, folder / SINGLE)
        with pytest.raises(WeightsInvalid, match=message):
            check_weights(tmp_path / "base", folder)
    with pytest.raises(WeightsSourceError, match="no folder"):
        check_weights(tmp_path / "base", tmp_path / "nowhere")
    with pytest.raises(WeightsSourceError):
        check_weights(tmp_path / "nowhere", tmp_path / "base")


def test_layers_are_checked_as_one(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "delta").mkdir()
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "delta" / SINGLE)
    layers = [tmp_path / "base", tmp_path / "delta"]
    assert check_weights(tmp_path / "base", layers).digests == stage_weights(model, layers).digests


def test_the_type_of_the_replica_is_that_of_its_device(tmp_path: Path) -> None:
    tiny_model().bfloat16().save_pretrained(tmp_path)
    narrow = check_weights(tmp_path, tmp_path, device="cuda")
    assert narrow.digests == check_weights(tmp_path, tmp_path, dtype="bfloat16").digests
    with pytest.raises(WeightsInvalid, match="of another dtype"):
        check_weights(tmp_path, tmp_path, device="cpu")


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(WeightsInvalid, match="quantized"):
        check_weights(tmp_path, tmp_path)
