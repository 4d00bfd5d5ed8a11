from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.app import build_app
from serve_app.settings import parse_settings
from tests.tools.strict_serve import unknown_keys

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(
    str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml") if path.parent.name in ("configs", "examples")
)


def test_every_config_is_looked_at() -> None:
    assert len(NAMES) >= 7


@pytest.mark.parametrize("name", NAMES)
def test_serve_and_the_application_know_every_key(name: str) -> None:
    config = yaml.safe_load((CONFIGS / name).read_text())
    assert unknown_keys(config) == []
    ServeDeploySchema.model_validate(config)
    build_app(parse_settings(config["applications"][0]["args"]))


def test_an_unknown_key_is_found_however_deep() -> None:
    config = {"applications": [{"import_path": "m:a", "route_prefx": "/", "args": {"anything": 1}}], "http": {}}
    assert unknown_keys(config) == ["applications[0].route_prefx", "http"]


def test_the_local_config_scales_from_one_to_two_cpu_replicas_on_loopback() -> None:
    config = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    settings = parse_settings(config["applications"][0]["args"])
    assert (settings.replicas.min, settings.replicas.max, settings.replicas.num_gpus) == (1, 2, 0)
    assert settings.replicas.is_autoscaled
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_the_gpu_config_gives_each_replica_one_gpu_in_bfloat16() -> None:
    settings = parse_settings(yaml.safe_load((CONFIGS / "gpu.yaml").read_text())["applications"][0]["args"])
    assert (settings.replicas.num_gpus, settings.dtype, settings.device) == (1, "bfloat16", "cuda")


def test_the_tensor_parallel_config_gives_each_of_two_ranks_one_gpu() -> None:
    config = yaml.safe_load((CONFIGS / "tensor-parallel.yaml").read_text())
    replicas = parse_settings(config["applications"][0]["args"]).replicas
    assert (replicas.tensor_parallel_size, replicas.num_gpus) == (2, 1)
