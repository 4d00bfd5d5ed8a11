import json
import os
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from serve_app.cli import main
from serve_app.cli.doctor import examine, machine, packages
from serve_app.cli.doctor.application import check_application
from serve_app.cli.doctor.finding import Finding, Level
from serve_app.cli.serve_config import Overrides
from serve_app.settings import available_cores
from tests.ports import free_port
from tests.serve_app.tiny_model import make_model_folder

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"


@pytest.fixture(autouse=True)
def _without_keys_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("ADMIN_KEY", "ADMIN_KEY_FILE", "API_KEYS", "API_KEYS_FILE"):
        monkeypatch.delenv(f"PITSTOP_{name}", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(make_model_folder(tmp_path / "model"))


def problems(findings: Iterable[Finding]) -> dict[str, Finding]:
    """What is not good, by subject; each of it says why and what to do."""
    found = [finding for finding in findings if finding.level != Level.GOOD]
    assert all(finding.why and finding.remedy for finding in found)
    return {finding.subject: finding for finding in found}


def look(folder: Path, tmp_path: Path, *, host: str = "127.0.0.1", **args: Any) -> dict[str, Finding]:
    """The problems of a config with these settings on a free port."""
    tree = yaml.safe_load(CONFIG.read_text())
    tree["http_options"] = {"host": host, "port": free_port()}
    tree["applications"][0]["args"] = {
        "model": str(folder),
        "device": "cpu",
        "weights": {"folder": str(tmp_path)},
    } | args
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return problems(check_application(file, Overrides(), cache_dir=tmp_path, environment={}))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["pitstop", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_right_config_has_no_problem(model: Path, tmp_path: Path) -> None:
    assert look(model, tmp_path) == {}


def test_packages_are_compared_with_the_ranges_of_this_version() -> None:
    assert problems(packages.check_python()) == {}
    assert problems(packages.check_packages()) == {}
    found = [
        *packages.check_packages(["torch<1", "a-package-that-is-not-there>=1", "rich>=1", "numpy>99; extra == 'x'"])
    ]
    first, second, last = found
    assert first.level == Level.ERROR
    assert first.what == f"torch is {torch.__version__}, supported is <1"
    assert (second.what, second.remedy) == (
        "a-package-that-is-not-there is not installed",
        "pip install 'a-package-that-is-not-there>=1'",
    )
    assert last.what.startswith("1 of")


def test_a_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*machine.check_shared_memory(tmp_path / "none")] == []
    monkeypatch.setattr(machine, "LEAST_SHARED_BYTES", 2**60)
    assert problems(machine.check_shared_memory(tmp_path))["shared memory"].level == Level.WARNING


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_DISK_BYTES", 2**60)
    assert "GiB free in" in problems(machine.check_disk(tmp_path))["disk"].what


def test_few_open_files_are_a_warning() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        assert "up to 1024" in problems(machine.check_open_files())["open files"].what
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_compiled_code_needs_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    assert problems(machine.check_numba_cache({})) == {}
    assert problems(machine.check_numba_cache({"NUMBA_CACHE_DIR": str(tmp_path / "new" / "folder")})) == {}
    found = problems(machine.check_numba_cache({"NUMBA_CACHE_DIR": str(blocked)}))
    assert str(blocked) in found["compiled code"].what
    monkeypatch.setenv("HOME", str(blocked))
    assert " and " in problems(machine.check_numba_cache({}, engine=blocked))["compiled code"].what


def test_who_may_run_code_through_ray_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    assert problems(machine.check_ray({}, home=tmp_path)) == {}
    assert problems(machine.check_ray({"RAY_AUTH_TOKEN": "x"}, home=blocked)) == {}
    assert problems(machine.check_ray({"RAY_AUTH_TOKEN_PATH": str(blocked)}, home=blocked)) == {}
    assert problems(machine.check_ray({}, home=blocked))["ray"].level == Level.ERROR
    assert "runs code" in problems(machine.check_ray({"RAY_AUTH_MODE": "disabled"}, home=tmp_path))["ray"].why
    assert "10.0.0.1" in problems(machine.check_ray({"RAY_ADDRESS": "10.0.0.1:6379"}, home=tmp_path))["ray"].what


def test_a_gpu_without_flash_attn_is_told(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    found = [*machine.check_gpu()]
    assert found[0].what == "0: a card, 1.0 of 2.0 GiB free"
    assert problems(found)["flash-attn"].level == Level.WARNING
    assert "none is used" in look(model, tmp_path)["gpu"].what


@pytest.mark.parametrize(
    ("args", "subject", "what"),
    [
        ({"replicas": {"most": 2}}, "config", "replicas.most is not a setting"),
        ({"model": "/nowhere"}, "model", "the model folder /nowhere does not exist"),
        ({"model": "nobody/has-this-model"}, "model", "nobody/has-this-model is not in the hub's cache"),
        ({"model": "no<name>"}, "model", "'no<name>' is neither a folder nor a name"),
        ({"replicas": {"num_gpus": 8}}, "gpu", "8 GPU(s) are asked for"),
        ({"device": "cuda"}, "gpu", "device is 'cuda', and torch sees no GPU"),
        ({"device": "tpu"}, "config", "device is 'tpu'; it must be auto, cpu, cuda"),
        ({"replicas": {"num_cpus": 1000}}, "cores", "replicas.min asks Ray for 1000 CPUs"),
        ({"replicas": {"torch_threads": 1000}}, "threads", "1000 of torch in 1 replica(s)"),
        ({"weights": {"folder": "/nowhere"}}, "weights.folder", "/nowhere does not exist"),
        ({"weights": {}}, "weights.folder", "none is set"),
        ({"api_keys_file": "/nowhere"}, "keys", "/nowhere"),
        ({"host": "0.0.0.0"}, "keys", "the API listens on 0.0.0.0"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_found(
    args: dict[str, Any], subject: str, what: str, model: Path, tmp_path: Path
) -> None:
    found = look(model, tmp_path, **args)
    assert list(found) == [subject]
    assert what in found[subject].what


def test_a_model_that_cannot_be_served_is_found_from_its_config(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    found = look(model, tmp_path)
    assert "encoder-decoder" in found["model"].what
    (model / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    args = {"replicas": {"tensor_parallel_size": 3, "num_cpus": 0.1}, "device": "auto"}
    assert "divides" in look(model, tmp_path, **args)["model"].what


def test_a_model_of_the_hub_cannot_come_where_the_hub_is_off(tmp_path: Path) -> None:
    overrides = Overrides(port=free_port(), model="nobody/has-this-model")
    environment = {"HF_HUB_OFFLINE": "1"}
    found = problems(check_application(CONFIG, overrides, cache_dir=tmp_path, environment=environment))
    assert found["model"].level == Level.ERROR


def test_memory_for_the_replicas_and_for_a_swap(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(model / "model.safetensors", 2**30)
    for free, level in ((1.5, Level.ERROR), (3.0, Level.WARNING)):
        monkeypatch.setattr("serve_app.cli.preflight.available_bytes", lambda free=free: int(free * 2**30))
        assert look(model, tmp_path)["memory"].level == level
    undo = {"weights": {"folder": str(tmp_path), "undo_folder": str(tmp_path)}}
    assert look(model, tmp_path, **undo) == {}
    monkeypatch.setattr("serve_app.cli.preflight.available_bytes", lambda: 2**33)
    assert look(model, tmp_path) == {}


def test_a_low_limit_of_threads_is_found(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    tree = yaml.safe_load(CONFIG.read_text())
    threads = available_cores() + 1
    tree["applications"][0]["args"] = {"model": str(model), "replicas": {"torch_threads": threads}}
    file.write_text(yaml.safe_dump(tree))
    environment = {"OMP_NUM_THREADS": str(threads - 1)}
    found = [*check_application(file, Overrides(port=free_port()), cache_dir=tmp_path, environment=environment)]
    assert f"OMP_NUM_THREADS is {threads - 1}, below the {threads}" in str(found)


def test_a_taken_port_fails_the_command_and_the_rest_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("--port", str(port), "--model", model, "--cache-dir", tmp_path)
        assert run(monkeypatch, CONFIG, *options, "--json") == 1
        found = json.loads(capsys.readouterr().out)
        (problem,) = (finding for finding in found if finding["level"] == "error")
        assert problem["subject"] == "port"
        assert f"port {port} on 127.0.0.1 is in use" in problem["what"]
        assert {"python", "torch", "ray", "config", "model", "keys"} <= {finding["subject"] for finding in found}
        assert run(monkeypatch, CONFIG, *options) == 1
    shown = capsys.readouterr().out
    assert f"port {port} on 127.0.0.1 is in use" in shown
    assert "1 error(s)" in shown


def test_without_a_config_the_machine_alone_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json") == 0
    subjects = {finding["subject"] for finding in json.loads(capsys.readouterr().out)}
    assert "disk" in subjects
    assert "port" not in subjects


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Any:
        raise OSError("no such device")

    monkeypatch.setattr(machine, "check_disk", fail)
    found = examine(None, Overrides(), cache_dir=tmp_path)
    assert [finding.what for finding in found if finding.level == Level.ERROR] == [
        "the check failed: OSError: no such device"
    ]
    assert any(finding.subject == "ray" for finding in found)
