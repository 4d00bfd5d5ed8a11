import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from serve_app.cli import main
from serve_app.cli.failure import CommandFailed
from serve_app.cli.key_file import ensure_key_file, find_admin_key
from serve_app.cli.launch import announce
from serve_app.cli.serve_config import Overrides, read_config
from serve_app.cli.startup import failure_in
from serve_app.cli.status import print_status
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    DrainResult,
    FleetStatus,
    PauseLease,
    ReplicaReport,
    RollbackRequest,
    SwapFailure,
    SwapRequest,
    SwapResult,
    WeightSource,
)
from serve_app.protocol.drains import DrainBody, UndrainBody
from serve_app.protocol.parsing import parse_body
from serve_app.protocol.weights import RollbackBody, SwapBody
from tests.ports import free_port

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
APPLICATION = "import_path: 'serve_app.app:build_app'"
REPLICAS = ("applications", 0, "args", "replicas")
WRONG_VALUES: list[Any] = [None, True, -1, 1.5, "abc", "", [], [1], [{}], {}, {"x": 1}, {1: 2}]
PYTHONS_OWN = (
    *("Traceback", "NoneType", "object is not", "object has no", "Error", "argument", "indices", "instance of"),
)
"""What a message has that Python or a library made and nobody wrote for the user."""
HUGE_BYTES = 2**43
"""Of a sparse file: nothing is stored, and no machine's memory holds it."""


@pytest.fixture(autouse=True)
def _without_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PITSTOP_ADMIN_KEY", raising=False)
    monkeypatch.delenv("PITSTOP_ADMIN_KEY_FILE", raising=False)


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    return free_port()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit status of the command line."""
    monkeypatch.setattr("sys.argv", ["pitstop", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def make_model(folder: Path, *, weights_bytes: int = 8) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", weights_bytes)
    return folder


def test_serve_names_a_taken_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(monkeypatch, "serve", CONFIG, "--port", str(port)) == 1
    assert f"port {port} on 127.0.0.1 is in use" in refusal(capsys)


def test_serve_says_how_to_get_the_default_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    assert run(monkeypatch, "serve", CONFIG, "--port", str(free_port), "--cache-dir", tmp_path) == 1
    assert "run `pitstop fetch`" in refusal(capsys)


def test_serve_names_the_file_of_a_key_that_can_be_guessed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("short alice")
    monkeypatch.setenv("PITSTOP_API_KEYS_FILE", str(keys))
    assert run(monkeypatch, "serve", CONFIG, "--port", str(free_port), "--cache-dir", tmp_path) == 1
    assert f"the API key in {keys} has 5 characters; use at least 16" in refusal(capsys)


@pytest.mark.parametrize(("is_set", "told"), [(True, 1), (False, 0)])
def test_the_request_to_try_has_a_key_where_one_is_needed(
    is_set: bool, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PITSTOP_API_KEYS_FILE", raising=False)
    monkeypatch.setenv("PITSTOP_API_KEYS", "user-0123456789abcdef" if is_set else "")
    config = read_config(CONFIG, Overrides())
    config.args["served_model_name"] = "tiny"
    announce(config)
    shown = capsys.readouterr().out
    assert shown.count("-H 'authorization: Bearer KEY'") == told
    assert "0123456789abcdef" not in shown


@pytest.mark.parametrize(
    ("missing", "reason"),
    [(".", "does not exist"), ("config.json", "holds no config.json"), ("model.safetensors", "holds no *.safetensors")],
)
def test_serve_names_what_a_model_folder_lacks(
    missing: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    folder = tmp_path / "model"
    if missing != ".":
        (make_model(folder) / missing).unlink()
    options = ("--port", str(free_port), "--model", folder, "--cache-dir", tmp_path / "cache")
    assert run(monkeypatch, "serve", CONFIG, *options) == 1
    assert reason in refusal(capsys)


@pytest.mark.parametrize(
    ("args", "num_present", "reason"),
    [
        ({"device": "tpu"}, 0, "device is 'tpu'; it must be auto, cpu, cuda"),
        ({"device": "cuda"}, 0, "device is 'cuda', and torch sees no GPU"),
        ({"device": "cuda:0"}, 0, "device is 'cuda:0', and torch sees no GPU"),
        ({"device": "cuda:2"}, 2, "device is 'cuda:2', and torch sees 2 GPU(s), which count from 0"),
        ({"device": "auto", "replicas": {"num_gpus": 1}}, 0, "1 GPU(s) are asked for by replicas.min"),
        ({"device": "cuda", "replicas": {"min": 3, "max": 3, "num_gpus": 1}}, 2, "3 GPU(s) are asked for"),
        # All is there, so that the model is looked for next.
        ({"device": "cuda:1", "replicas": {"num_gpus": 1}}, 2, "run `pitstop fetch`"),
        ({"device": "auto"}, 0, "run `pitstop fetch`"),
        ({"device": "cpu", "replicas": {"min": 0, "num_gpus": 0}}, 0, "run `pitstop fetch`"),
    ],
)
def test_a_device_that_is_not_there_is_told_before_anything_starts(
    args: dict[str, Any],
    num_present: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_present > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_present)
    tree = yaml.safe_load(CONFIG.read_text())
    tree["applications"][0]["args"] = args
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert run(monkeypatch, "serve", config, "--port", str(free_port), "--cache-dir", tmp_path / "cache") == 1
    assert reason in refusal(capsys)


@pytest.mark.parametrize("setting", ["folder", "store", "undo_folder"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/proc/nope", "does not exist; make or mount it"),
        ("/proc", "cannot be written: "),
        ("/etc/hostname", "cannot be written: Not a directory"),
    ],
)
def test_a_folder_of_weights_that_cannot_be_used_is_told_before_anything_starts(
    setting: str,
    place: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    tree = yaml.safe_load(CONFIG.read_text())
    tree["applications"][0]["args"] = {"model": str(make_model(tmp_path / "model")), "weights": {setting: place}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    # Only where nothing is said of the folder is the cache folder's last file in the way.
    (tmp_path / "cache" / "run" / f"serve-{free_port}.yaml").mkdir(parents=True)
    assert run(monkeypatch, "serve", config, "--port", str(free_port), "--cache-dir", tmp_path / "cache") == 1
    assert f"weights.{setting} {place} {reason}" in refusal(capsys)


MISSHAPEN_CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "cut off": b'{"dtype": "flo',
    "no text": b"\xff\xfe\x00",
    "nested without end": b"[" * 100_000,
    "list": b"[]",
    "null": b"null",
    "number": b"5",
    "text": b'"llama"',
}


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize("content", MISSHAPEN_CONFIGS.values(), ids=MISSHAPEN_CONFIGS.keys())
def test_a_config_of_a_model_that_cannot_be_read_is_told_in_one_line(
    content: bytes,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "config.json").write_bytes(content)
    options = ("--port", str(free_port), "--model", folder, "--cache-dir", tmp_path / "cache")
    if command == "serve":
        assert run(monkeypatch, "serve", CONFIG, *options) == 1
        told = refusal(capsys)
    else:
        assert run(monkeypatch, "doctor", CONFIG, *options, "--json") == 1
        (told,) = (one["what"] for one in json.loads(capsys.readouterr().out) if one["level"] == "error")
    assert f"{folder / 'config.json'} " in told
    assert "is not JSON" in told or "a model's config is an object" in told


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("~nobody-of-this-name/model", "cannot be read: Could not determine home directory"),
        ("/" + "x" * 300, "cannot be read: File name too long"),
    ],
)
def test_a_name_that_no_folder_can_have_is_told(
    model: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    assert run(monkeypatch, "serve", CONFIG, "--port", str(free_port), "--model", model, "--cache-dir", tmp_path) == 1
    assert reason in refusal(capsys)


def test_weights_that_are_links_to_nothing_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model-2.safetensors").symlink_to(tmp_path / "gone")
    assert run(monkeypatch, "serve", CONFIG, "--port", str(free_port), "--model", folder, "--cache-dir", tmp_path) == 1
    assert "model-2.safetensors is no file" in refusal(capsys)


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("place", ["/proc/nope", "a file", "a file/below", "a folder with a file named run"])
def test_a_cache_folder_that_cannot_be_written_is_told_before_anything_starts(
    place: str,
    has_key: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    if has_key:
        monkeypatch.setenv("PITSTOP_ADMIN_KEY", "0123456789abcdef")
    cache_dir = tmp_path / place
    (tmp_path / "a file").touch()
    (tmp_path / "a folder with a file named run").mkdir()
    (tmp_path / "a folder with a file named run" / "run").touch()
    options = ("--port", str(free_port), "--model", make_model(tmp_path / "model"), "--cache-dir", cache_dir)
    assert run(monkeypatch, "serve", CONFIG, *options) == 1
    told = refusal(capsys)
    assert str(cache_dir) in told
    assert "cannot be written: " in told
    assert "name another cache folder with --cache-dir" in told
    if "run" not in place:
        run(monkeypatch, "doctor", "--cache-dir", cache_dir, "--json")
        (problem,) = (one for one in json.loads(capsys.readouterr().out) if one["subject"] == "cache folder")
        assert problem["level"] == "error"
        assert f"{cache_dir} cannot be written" in problem["what"]


@pytest.mark.parametrize("name", ["run/serve-{port}.yaml", "admin.key"])
def test_what_lies_in_the_way_of_a_file_of_the_cache_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    in_the_way = tmp_path / "cache" / name.format(port=free_port)
    in_the_way.mkdir(parents=True)
    model = make_model(tmp_path / "model")
    options = ("--port", str(free_port), "--model", model, "--replicas", "1", "--cache-dir", tmp_path / "cache")
    assert run(monkeypatch, "serve", CONFIG, *options) == 1
    told = refusal(capsys)
    assert str(in_the_way) in told
    assert "Is a directory" in told


def test_a_made_up_key_that_was_cut_off_is_told(tmp_path: Path) -> None:
    (tmp_path / "admin.key").touch()
    with pytest.raises(CommandFailed, match=r"there is no admin key in .*; remove .*admin\.key to have another made"):
        ensure_key_file(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CommandFailed, match="cannot be kept in"):
        ensure_key_file(tmp_path / "file")


def test_looking_at_a_cache_folder_leaves_nothing_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "doctor", "--cache-dir", tmp_path / "not" / "there", "--json") == 0
    assert "can be written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["..", "\u00e4..b", "a\0b", "no such name"])
def test_a_host_that_is_no_name_is_told(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tree = yaml.safe_load(CONFIG.read_text())
    tree["http_options"]["host"] = host
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert run(monkeypatch, "serve", config, "--cache-dir", tmp_path) == 1
    assert repr(host)[1:-1] in refusal(capsys)


def test_serve_compares_the_model_with_free_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    folder = make_model(tmp_path / "model", weights_bytes=HUGE_BYTES)
    options = ("--port", str(free_port), "--model", folder, "--replicas", "2", "--cache-dir", tmp_path / "cache")
    assert run(monkeypatch, "serve", CONFIG, *options) == 1
    assert "2 replica(s) of model need about 16386.0 GiB" in refusal(capsys)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not YAML"),
        ("a: 2020-13-45", "is not YAML: a value in it cannot be read"),
        ("a: !!timestamp soon", "is not YAML: a value in it cannot be read"),
        ("\x07", "is not YAML"),
        ("[" * 5000, "is nested too deeply for a config"),
        ("", "it is empty; it must be a mapping with applications in it; configs/local.yaml shows one"),
        ("# nothing", "it is empty"),
        ("[1, 2]", "it holds [1, 2]; it must be a mapping with applications in it"),
        ("5", "it holds 5"),
        ("applications", "it holds 'applications'"),
        ("{}", "applications is missing"),
        ("applications:", "applications is missing"),
        ("applications: []", "none of its applications has this import_path; they have none"),
        ("applications: 3", "applications is 3; it must be a list"),
        ("applications: {a: 1}", "applications is {'a': 1}; it must be a list"),
        ("applications: &a [*a]", "applications.0 is [[...]]; it must be a mapping"),
        ("applications: [3]", "applications.0 is 3; it must be a mapping"),
        ("applications: [{}, {import_path: 'other:app'}]", "they have None, 'other:app'"),
        (f"applications: [{{{APPLICATION}, args: 5}}]", "args is 5; it must be a mapping of settings"),
        (f"applications: [{{{APPLICATION}, args: [x]}}]", "args is ['x']; it must be a mapping"),
        (f"applications: [{{{APPLICATION}, name: [x]}}]", "name is ['x']; it must be a text"),
        (f"applications: [{{{APPLICATION}, route_prefix: x}}]", "route_prefix is 'x'; it must be / or begin with one"),
        (f"applications: [{{{APPLICATION}, route_prefix: /x/}}]", "route_prefix is '/x/'"),
        (f"applications: [{{{APPLICATION}, route_prefix: null}}]", "route_prefix is None"),
        (f"http_options: 5\napplications: [{{{APPLICATION}}}]", "http_options is 5; it must be a mapping"),
        *(
            (
                f"http_options: {{port: {port}}}\napplications: [{{{APPLICATION}}}]",
                f"http_options.port is {shown}; a port is 1 to 65535",
            )
            for port, shown in {
                "0": "0",
                "65536": "65536",
                "-1": "-1",
                "abc": "'abc'",
                "null": "None",
                "true": "True",
                "80.5": "80.5",
                "[80]": "[80]",
                "'\u00b2'": "'\u00b2'",
                "''": "''",
            }.items()
        ),
        (f"http_options: {{host: 5}}\napplications: [{{{APPLICATION}}}]", "http_options.host is 5"),
        (f"http_options: {{host: null}}\napplications: [{{{APPLICATION}}}]", "http_options.host is None"),
    ],
)
def test_serve_refuses_a_file_that_is_no_config(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert run(monkeypatch, "serve", config) == 1
    told = refusal(capsys)
    assert reason in told
    assert str(config) in told


def places_in(tree: Any, *above: str | int) -> Iterator[tuple[str | int, ...]]:
    """The way to each part of a tree, itself included."""
    yield above
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places_in(inner, *above, key)


def with_value(tree: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """The tree with another value there."""
    if not place:
        return value
    changed = tree.copy()
    changed[place[0]] = with_value(tree[place[0]], place[1:], value)
    return changed


def whole_config() -> Any:
    """Our config with one of each kind that it has none of."""
    tree = yaml.safe_load(CONFIG.read_text())
    tree["applications"][0]["args"] |= {
        "engine": {"page_size": 16},
        "cors_origins": ["*"],
        "weights": {"store": "/tmp"},
    }
    tree["applications"][0] |= {"deployments": [{"name": "EngineReplica"}], "runtime_env": {"env_vars": {"A": "b"}}}
    return tree


@pytest.mark.parametrize("place", [*places_in(whole_config())], ids=str)
def test_a_wrong_value_anywhere_in_a_config_is_told_in_one_line(
    place: tuple[str | int, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    tree = whole_config()
    config = tmp_path / "config.yaml"
    for value in WRONG_VALUES:
        if place[-1:] == ("model",) and value == "abc":
            # Might be one of the hub.
            continue
        config.write_text(yaml.safe_dump(with_value(tree, place, value)))
        # Where the value may be, the model is what is lacking.
        assert run(monkeypatch, "serve", config, "--port", str(free_port), "--cache-dir", tmp_path / "cache") == 1
        told = refusal(capsys)
        assert len(told) < 700, told
        assert not any(word in told for word in PYTHONS_OWN), (value, told)


@pytest.mark.parametrize("replicas", [5, [1], "x"])
def test_replicas_of_the_command_line_need_a_mapping_in_the_file(
    replicas: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(with_value(yaml.safe_load(CONFIG.read_text()), REPLICAS, replicas)))
    assert run(monkeypatch, "serve", config, "--replicas", "2") == 1
    assert f"replicas is {replicas!r}; it must be a mapping with min and max" in refusal(capsys)


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:8000"), ("::", "http://127.0.0.1:8000"), ("a.org", "http://a.org:8000")]
)
def test_the_url_of_an_address_is_one(host: str, url: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(with_value(yaml.safe_load(CONFIG.read_text()), ("http_options", "host"), host)))
    assert read_config(config, Overrides()).url == url


def test_serve_names_a_setting_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    tree = yaml.safe_load(CONFIG.read_text())
    tree["applications"][0]["args"]["replicas"]["most"] = 2
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    assert run(monkeypatch, "serve", config, "--port", str(free_port)) == 1
    assert "replicas.most is not a setting" in refusal(capsys)


@pytest.mark.parametrize(
    ("line", "misspelt", "named"),
    [
        ("http_options:", "http_optoins:", "http_optoins is not"),
        ("  host:", "  hots:", "http_options.hots is not"),
        ("  log_level:", "  log_levle:", "logging_config.log_levle is not"),
        ("    route_prefix:", "    route_perfix:", "applications.route_perfix is not"),
        ("proxy_location:", "proxy_location: Moon #", "proxy_location is 'Moon'; input should be 'Disabled'"),
        ("  log_level:", "  log_level: LOUD #", "logging_config.log_level is 'LOUD'; got"),
        (
            "    route_prefix:",
            "    deployments: [5]\n    route_prefix:",
            "applications.0.deployments.0 is 5; it must be a mapping",
        ),
    ],
)
def test_serve_names_what_serve_would_leave_out_or_refuse(
    line: str,
    misspelt: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    free_port: int,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.read_text().replace(f"\n{line}", f"\n{misspelt}"))
    assert run(monkeypatch, "serve", config, "--port", str(free_port)) == 1
    assert named in refusal(capsys)


@pytest.mark.parametrize("options", ["", "http_options:\n", "http_options: {port: 9000}\n"])
def test_a_file_that_names_no_host_is_served_on_loopback(options: str, tmp_path: Path) -> None:
    file, rendered = tmp_path / "config.yaml", tmp_path / "rendered.yaml"
    file.write_text(options + "applications: [{import_path: 'serve_app.app:build_app'}]")
    read_config(file, Overrides(port=8123)).write(rendered)
    assert yaml.safe_load(rendered.read_text())["http_options"] == {"host": "127.0.0.1", "port": 8123}


@pytest.mark.parametrize("config", sorted(CONFIG.parent.glob("*.yaml")), ids=lambda path: path.name)
def test_serve_knows_every_key_of_our_configs(config: Path) -> None:
    assert read_config(config, Overrides()).problem() is None


def test_overrides_change_three_things_and_nothing_else(tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    config = read_config(CONFIG, Overrides(port=8123, model="/some/folder", replicas=2))
    config.write(rendered)
    expected = yaml.safe_load(CONFIG.read_text())
    expected["http_options"]["port"] = 8123
    expected["applications"][0]["args"]["model"] = "/some/folder"
    expected["applications"][0]["args"]["replicas"] |= {"min": 2, "max": 2}
    assert yaml.safe_load(rendered.read_text()) == expected
    assert config.url == "http://127.0.0.1:8123"


def test_the_made_up_key_is_the_owners_alone_and_stays(tmp_path: Path) -> None:
    path = ensure_key_file(tmp_path / "cache")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = find_admin_key(None, None, cache_dir=tmp_path / "cache")
    assert len(key) >= 32
    path.chmod(0o644)
    assert ensure_key_file(tmp_path / "cache") == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_admin_key(None, None, cache_dir=tmp_path / "cache") == key
    assert find_admin_key("from-the-environment", path, cache_dir=tmp_path) == "from-the-environment"


def test_a_key_file_is_read_as_the_application_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the new one\n\n  first-0123456789abcdef\nsecond-0123456789abcdef\n")
    assert find_admin_key(None, file, cache_dir=tmp_path) == "first-0123456789abcdef"
    for text in ("", "# nothing but this\n"):
        file.write_text(text)
        with pytest.raises(CommandFailed, match="there is no admin key"):
            find_admin_key(None, file, cache_dir=tmp_path)


@contextmanager
def admin_server(status: int, body: object) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server that gives one answer; yields its URL and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            asked.append({"path": self.path, "key": self.headers["authorization"], "body": json.loads(sent)})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *arguments: object) -> None:  # named so by the base class
            """Keep the output for what is tested."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_swap_sends_an_absolute_folder_with_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key_file = ensure_key_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PITSTOP_ADMIN_KEY_FILE", str(key_file))
    result = {"version": 2, "replicas": ["a", "b"], "paused_s": 0.04, "total_s": 1.5}
    with admin_server(200, result) as (url, asked):
        options = ("--in-flight", "abort", "--label", "step 5", "--idempotency-key", "k", "--strategy", "rolling")
        options += ("--max-paused", 2, "--on-failure", "rollback", "--pinned", "end", "--finish-timeout", 7)
        options += ("--verify", "--partial", "--wait", 3)
        assert run(monkeypatch, "swap", "--path", "new", *options, "--url", url) == 0
    (one,) = asked
    assert (one["path"], one["key"]) == ("/admin/weights", f"Bearer {key_file.read_text().strip()}")
    sent = parse_body(SwapBody, json.dumps(one["body"]).encode()).request(requested_by="")
    assert sent == SwapRequest(
        WeightSource(str(tmp_path / "new")),
        in_flight="abort",
        label="step 5",
        idempotency_key="k",
        strategy="rolling",
        max_paused=2,
        on_failure="rollback",
        pinned="end",
        finish_timeout_s=7.0,
        verify=True,
        partial=True,
        wait_s=3.0,
    )
    assert "version 2 is committed on 2 replica(s); longest pause 40 ms" in capsys.readouterr().out


def test_rollback_names_the_version_or_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    result = {"version": 4, "replicas": ["a"], "paused_s": 0.04, "total_s": 1.5}
    with admin_server(200, result) as (url, asked):
        assert run(monkeypatch, "rollback", "--url", url) == 0
        assert run(monkeypatch, "rollback", "--to", "2", "--idempotency-key", "k", "--url", url) == 0
    assert {one["path"] for one in asked} == {"/admin/weights/rollback"}
    bodies = [parse_body(RollbackBody, json.dumps(one["body"]).encode()) for one in asked]
    assert [body.request(requested_by="") for body in bodies] == [
        RollbackRequest(),
        RollbackRequest(2, idempotency_key="k"),
    ]
    assert "version 4 is committed on 1 replica(s)" in capsys.readouterr().out


def test_the_swap_says_what_it_left_and_who_lags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    result = {"version": 4, "replicas": ["a"], "paused_s": 0.04, "total_s": 1.5}
    with admin_server(200, result | {"lagging": ["b"], "replaced": [], "unchanged": ["w"]}) as (url, asked):
        assert run(monkeypatch, "swap", "--hub", "org/name", "--revision", "v2", "--url", url) == 0
    assert asked[0]["body"]["source"] == {"hub": "org/name", "revision": "v2"}
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not there yet, and out of routing until they are: b",
        "tensors left as they were: w",
    ]
    assert run(monkeypatch, "swap") == 1
    assert "name the weights by either --path or --hub" in refusal(capsys)


def test_pause_renews_and_resumes_by_its_lease(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    lease = asdict(PauseLease("l1", 5.0, 5.0, replicas=["a", "b"])) | {"ended": ["l1"]}
    with admin_server(200, lease) as (url, asked):
        assert run(monkeypatch, "pause", "--lease", 5, "--in-flight", "finish", "--url", url) == 0
        assert run(monkeypatch, "pause", "--renew", "l1", "--lease", 9, "--url", url) == 0
        assert run(monkeypatch, "pause", "--url", url) == 0
        assert run(monkeypatch, "pause", "--renew", "l1", "--url", url) == 0
        assert run(monkeypatch, "resume", "--lease-id", "l1", "--url", url) == 0
    assert [(one["path"], one["body"]) for one in asked] == [
        ("/admin/pause", {"lease_s": 5.0, "in_flight": "finish"}),
        ("/admin/pause/l1/renew", {"lease_s": 9.0}),
        ("/admin/pause", {"lease_s": 60.0, "in_flight": "keep"}),
        # As long as it was.
        ("/admin/pause/l1/renew", {"lease_s": None}),
        ("/admin/resume", {"lease_id": "l1"}),
    ]
    assert capsys.readouterr().out.splitlines() == [
        *["2 replica(s) stand still for 5 s: lease l1"] * 4,
        "ended 1 pause(s)",
    ]
    assert run(monkeypatch, "pause", "--renew", "l1", "--in-flight", "keep") == 1
    assert "--in-flight is for a new pause" in refusal(capsys)


def test_drain_names_who_is_out_of_service_and_fails_where_requests_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    with admin_server(200, asdict(DrainResult(["a", "b"], is_replaced=True))) as (url, asked):
        options = ("--timeout", 5, "--replace", "--url", url)
        assert run(monkeypatch, "drain", "a", "b", *options) == 0
        assert run(monkeypatch, "undrain", "--node", "10.0.0.1", "--url", url) == 0
    assert [(one["path"], one["body"]) for one in asked] == [
        (
            "/admin/drain",
            {"replica_ids": ["a", "b"], "node": None, "timeout_s": 5.0, "replace": True, "force": False},
        ),
        ("/admin/undrain", {"replica_ids": [], "node": "10.0.0.1"}),
    ]
    for one, model in zip(asked, (DrainBody, UndrainBody), strict=True):
        parse_body(model, json.dumps(one["body"]).encode())
    with admin_server(200, asdict(DrainResult(["a", "b"], {"b": 3}))) as (url, _):
        assert run(monkeypatch, "drain", "a", "b", "--url", url) == 1
        assert run(monkeypatch, "drain", "a", "b", "--json", "--url", url) == 1
    assert capsys.readouterr().out.splitlines() == [
        "drained and being replaced: a, b",
        "back in service: a, b",
        "drained: a",
        "b takes no new requests and still has 3",
        '{"replicas": ["a", "b"], "requests_left": {"b": 3}, "is_replaced": false}',
    ]
    assert run(monkeypatch, "drain", "--url", url) == 1
    assert "name replicas" in capsys.readouterr().err


def test_status_shows_the_history_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    result = SwapResult(2, 1, ["a"], staged_s=0.5, paused_s=0.04, total_s=0.6)
    status = FleetStatus(
        CommittedWeights(2),
        [ReplicaReport("a", 1, "lagging", error="there is no folder /w", number=0)],
        history=[
            CommittedVersion(2, WeightSource("/w"), label="[b]step 5[/b]", requested_by="me", result=result),
            CommittedVersion(1),
        ],
        problem="replica b cannot start",
        swap_in_progress="s",
        phase="park",
        pauses=[PauseLease("l1", 60.0, 30.0, requested_by="me")],
        failures=[SwapFailure("today", "source", "there is no folder /x", "step 6")],
    )
    print_status(asdict(status), as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "committed: version 2",
        "swap in progress: s, phase park",
        "paused: lease l1, 30 s left, by me",
        "problem: replica b cannot start",
        "not committed: today, step 6, there is no folder /x",
        "",
        "replica  number  version  state    running  waiting  KV cache  ranks  error",
        "a             0        1  lagging        0        0       0 %  1      there is no folder /w",
        "",
        "version  from                           label          committed  by  pause  in all",
        "      2  /w                             [b]step 5[/b]             me  40 ms   0.6 s",
        "      1  the model it was started with",
    ]


def test_swap_repeats_the_reason_of_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    with admin_server(400, {"error": {"message": "tensor lm_head.weight is missing"}}) as (url, _):
        assert run(monkeypatch, "swap", "--path", tmp_path, "--url", url) == 1
    assert "pitstop: tensor lm_head.weight is missing (HTTP 400)" in capsys.readouterr().err


def test_this_machine_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, free_port: int
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")
    with admin_server(400, {"error": {"message": "refused by the application"}}) as (url, _):
        for address in (url, url.replace("127.0.0.1", "localhost")):
            assert run(monkeypatch, "swap", "--path", tmp_path, "--url", address) == 1
            assert "refused by the application" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["schl\u00fcssel", "two\nlines", " "])
def test_a_key_that_no_header_carries_is_told(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", key)
    assert run(monkeypatch, "status", "--url", f"http://127.0.0.1:{free_port}") == 1
    assert "the admin key cannot be sent" in refusal(capsys)


def test_a_key_file_that_is_no_text_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    assert run(monkeypatch, "status", "--admin-key-file", tmp_path / "key") == 1
    assert "it is not text" in refusal(capsys)


COMMANDS = {
    "swap": ("--path", "/folder"),
    "rollback": (),
    "status": (),
    "pause": ("--lease", "5"),
    "resume": (),
    "drain": ("a",),
    "undrain": ("a",),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("answer", ["a page", [1], {}, None, {"error": 5}])
def test_every_command_tells_another_server_from_pitstop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, answer: object
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    with admin_server(200, answer) as (url, _):
        assert run(monkeypatch, command, *COMMANDS[command], "--url", url, "--json") == 1
    told = capsys.readouterr()
    assert "which is not Pitstop's; name the application with --url" in told.err
    assert told.out == ""


@pytest.mark.parametrize("options", [("drain", "a", "--timeout", "inf"), ("pause", "--lease", "inf")])
def test_a_number_without_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    assert run(monkeypatch, *options) == 1
    assert "cannot be sent" in capsys.readouterr().err


def test_status_says_when_nothing_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    monkeypatch.setenv("PITSTOP_ADMIN_KEY", "some-key")
    assert run(monkeypatch, "status", "--url", f"http://127.0.0.1:{free_port}") == 1
    assert f"nothing answers at http://127.0.0.1:{free_port}/admin/weights" in refusal(capsys)


def test_a_failed_deployment_is_told_by_the_last_line_of_its_traceback() -> None:
    healthy = {"status": "HEALTHY", "message": ""}
    broken = {
        "status": "UPDATING",
        "message": "A replica failed to start with exception. Retrying 5 more time(s). Error:\n"
        "\x1b[36mray::ServeReplica\x1b[39m (pid=1)\n  File 'x', line 1\nUnsupportedModel: mamba keeps no KV cache\n",
    }
    assert failure_in({"status": "DEPLOYING", "message": "", "deployments": {"Router": healthy}}) is None
    assert (
        failure_in({"status": "DEPLOYING", "message": "", "deployments": {"Router": healthy, "EngineReplica": broken}})
        == "EngineReplica: UnsupportedModel: mamba keeps no KV cache"
    )
    failed = {"status": "DEPLOY_FAILED", "message": "Traceback:\n  ...\nValueError: settings: x\n", "deployments": {}}
    assert failure_in(failed) == "ValueError: settings: x"
