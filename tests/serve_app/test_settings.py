"""Settings: defaults that work, refusals that name what is wrong, and the only look at the environment."""

import os
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from serve_app import settings as settings_module
from serve_app.app import engine_options
from serve_app.bearer_keys import parse_keys
from serve_app.settings import AppSettings, ReplicaSettings, available_cores, parse_settings

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PITSTOP_ADMIN_KEY", raising=False)
    monkeypatch.delenv("PITSTOP_ADMIN_KEY_FILE", raising=False)


def test_defaults_serve_the_default_model_with_a_bounded_queue() -> None:
    settings = AppSettings()
    assert settings.model_name == "smollm2-135m-instruct"
    assert settings.engine_config.max_queue_size == settings.limits.max_queued_requests > 0
    assert settings.admin_key() is None


def test_nested_values_of_a_config_file_are_taken() -> None:
    settings = parse_settings(
        {
            "model": "/models/tiny/",
            "seed": 7,
            "engine": {"page_size": 16, "max_queue_size": 3},
            "workload_hints": {"max_prompt_length": 64},
            "replicas": {"min": 1, "max": 2},
        }
    )
    assert settings.model_name == "tiny"
    assert (settings.engine_config.page_size, settings.engine_config.max_queue_size) == (16, 3)
    assert settings.engine_config.seed == 7
    assert settings.workload_hints.max_prompt_length == 64
    assert settings.replicas.is_autoscaled


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"modell": "x"}, "modell is not a setting"),
        ({"engine": {"page_sise": 16}}, "engine.page_sise is not a setting"),
        ({"workload_hints": {"max_prompt": 16}}, "workload_hints.max_prompt is not a setting"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas.min is 3"),
        ({"replicas": {"tensor_parallel_size": 0}}, "replicas.tensor_parallel_size is 0"),
        (
            {"replicas": {"tensor_parallel_size": 2, "num_gpus": 2}},
            "num_gpus is 2, for each of 2 tensor parallel ranks",
        ),
        ({"replicas": {"tensor_parallel_size": 2, "num_cpus": 0}}, "num_cpus is 0"),
        ({"engine": {"page_size": 2}}, "engine.page_size is 2"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"weights": {"folder": "weights"}}, "weights.folder is 'weights'; it must be absolute"),
        ({"weights": {"history_versions": 0}}, "weights.history_versions is 0"),
        (
            {"weights": {"undo_folder": "/undo"}, "replicas": {"tensor_parallel_size": 2}},
            "weights.undo_folder is '/undo' with replicas.tensor_parallel_size 2",
        ),
        ({"autoscaling": {"target_work_s": float("inf")}}, "autoscaling.target_work_s is inf"),
        ({"cors_origins": ["example.org"]}, "cors_origins.0 is 'example.org'; it must be *"),
        ({"cors_origins": ["*", "https://example.org/"]}, "cors_origins.1 is 'https://example.org/'"),
        ({"cors_origins": ["https://example.org/page"]}, "cors_origins.0 is"),
        ({"cors_origins": [""]}, "cors_origins.0 is ''"),
        *(
            ({"device": device}, f"device is {device!r}; it must be auto, cpu, cuda")
            for device in (
                "tpu",
                "gpu",
                "CPU",
                "cuda:",
                "cuda:x",
                "cuda:-1",
                "cuda:999",
                "cuda:1:2",
                "meta",
                "mps",
                " ",
            )
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name_in_one_line(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match="settings: ") as caught:
        parse_settings(values)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_every_device_that_is_taken_is_one_of_torch(device: str) -> None:
    assert torch.device(AppSettings(device=device).device).type == device.partition(":")[0]
    assert AppSettings().device == "auto"


@pytest.mark.parametrize("origin", ["*", "https://example.org", "http://localhost:3000", "http://[::1]:80", "app://x"])
def test_an_origin_is_taken_as_browsers_send_it(origin: str) -> None:
    assert AppSettings(cors_origins=[origin]).cors_origins == [origin]


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        AppSettings().model = "other"


def test_the_environment_wins_over_the_key_file_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured, from_environment = tmp_path / "configured", tmp_path / "environment"
    configured.write_text("configured-" + KEY + "\n")
    from_environment.write_text("environment-" + KEY + "\n")
    settings = AppSettings(admin_key_file=str(configured))
    assert settings.admin_key() == "configured-" + KEY
    monkeypatch.setenv("PITSTOP_ADMIN_KEY_FILE", str(from_environment))
    assert settings.admin_key() == "environment-" + KEY
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", KEY)
    assert settings.admin_key() == KEY


def test_a_missing_or_short_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        AppSettings(admin_key_file=str(tmp_path / "nothing")).admin_key()
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "short")
    with pytest.raises(ValueError, match="at least 16"):
        AppSettings().admin_key()


@pytest.mark.parametrize("key", ["schl\u00fcssel-" + KEY, KEY + " " + KEY, "\x7f" + KEY])
def test_a_key_that_no_header_carries_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", key)
    with pytest.raises(ValueError, match="printable ASCII"):
        AppSettings().admin_key()


def test_an_empty_key_file_does_not_open_the_admin_routes(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="there is no admin key in"):
        AppSettings(admin_key_file=str(empty)).admin_key()


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_cores_respect_the_quota_of_a_container(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(settings_module, "CGROUP_V2_CPU", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores() == cores
    assert ReplicaSettings(max=2).threads() == max(1, cores // 2)
    assert ReplicaSettings(max=2, tensor_parallel_size=2).threads() == max(1, cores // 4)


def test_ranks_of_a_replica_are_placed_together() -> None:
    settings = AppSettings(replicas=ReplicaSettings(tensor_parallel_size=3, num_cpus=0.5, num_gpus=1))
    options = engine_options(settings)
    assert options["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1}] * 3
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 1}
    assert "placement_group_bundles" not in engine_options(AppSettings())


def test_keys_of_users_come_with_their_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = KEY[::-1]
    file = tmp_path / "keys"
    file.write_text(f"# a comment\n\n{KEY} some tenant\n  {other}\n")
    settings = AppSettings(api_keys_file=str(file))
    assert parse_keys(settings.api_keys(), what="API key") == {KEY: "some tenant", other: None}
    monkeypatch.setenv("PITSTOP_API_KEYS", f"{other} t,{KEY}")
    assert parse_keys(settings.api_keys(), what="API key") == {other: "t", KEY: None}
    assert not AppSettings().admin_keys().is_set


def test_an_admin_key_may_hold_any_printable_character(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123,456#89;abcdef~"
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", key)
    assert AppSettings().admin_key() == key


def test_the_store_is_where_it_was_said_else_beside_the_manifest_else_temporary() -> None:
    def place(application: str = "my/app", owner: str = "me", **weights: str) -> tuple[str, bool]:
        settings = parse_settings({"weights": weights}).weights
        return str(settings.store_folder(application, owner=owner)), settings.is_store_durable

    assert place(store="/a", folder="/b") == ("/a/my%2Fapp-me", True)
    assert place(folder="/b") == ("/b/store", True)
    temporary, is_durable = place()
    assert not is_durable
    assert temporary.endswith("-my%2Fapp-me")
    assert temporary == place()[0]
    # Each removes what its own history does not need.
    for weights in ({"store": "/a"}, {}):
        others = [place(**weights), place(owner="you", **weights), place("my_app", **weights)]
        assert len(set(others)) == 3
    with pytest.raises(ValueError, match=r"weights\.store is 'a'; it must be absolute"):
        place(store="a")


@pytest.mark.parametrize("section", ["engine", "workload_hints", "replicas", "weights"])
@pytest.mark.parametrize("value", [5, "x", [1], {1: 2}])
def test_a_section_that_is_no_mapping_of_names_is_refused_in_one_line(section: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"settings: {section}(\.1)? is ") as caught:
        parse_settings({section: value})
    assert "instance of" not in str(caught.value)
    assert "\n" not in str(caught.value)
