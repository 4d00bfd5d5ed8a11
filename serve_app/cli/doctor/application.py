"""The application that a config file asks for: whether this machine can serve it."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path

from engine import PitstopError, check_model
from serve_app.bearer_keys import parse_keys
from serve_app.cli.doctor.finding import Finding, Findings, error, good, warning
from serve_app.cli.failure import CommandFailed
from serve_app.cli.preflight import (
    GIB,
    check_device,
    check_memory,
    check_port,
    check_weight_folder,
    locate_model,
    weights_bytes,
)
from serve_app.cli.serve_config import Overrides, ServeConfig, read_config
from serve_app.settings import AppSettings, available_cores, parse_settings


def check_application(
    config_file: Path, overrides: Overrides, *, cache_dir: Path, environment: Mapping[str, str]
) -> Findings:
    """Gives what is to be said of the config, and of what it asks of this machine."""
    try:
        config = read_config(config_file, overrides)
        if (refusal := config.problem()) is not None:
            raise ValueError(refusal)
        settings = parse_settings(config.args)
    except (CommandFailed, ValueError) as problem:
        yield error("config", str(problem), why="nothing is started from it", remedy=f"correct {config_file}")
        return
    yield good("config", f"{config_file}: application {config.name} at {config.url}")
    yield _port(config)
    yield from _model(settings, cache_dir=cache_dir, environment=environment)
    yield from _devices(settings)
    yield from _threads(settings, environment)
    yield from _folders(settings)
    yield from _keys(settings, config)


def _port(config: ServeConfig) -> Finding:
    try:
        check_port(config.host, config.port)
    except CommandFailed as problem:
        return error("port", str(problem), why="the API cannot listen", remedy="stop its user, or --port")
    return good("port", f"{config.port} on {config.host} is free")


def _model(settings: AppSettings, *, cache_dir: Path, environment: Mapping[str, str]) -> Findings:
    try:
        place = locate_model(settings.model, cache_dir=cache_dir)
    except CommandFailed as problem:
        yield error("model", str(problem), why="no replica can load it", remedy="correct `model`, or --model")
        return
    folder = Path(place)
    if not folder.is_dir():
        yield _hub_model(place, environment)
        return
    replicas = settings.replicas
    try:
        check_model(
            place,
            trust_remote_code=settings.trust_remote_code,
            tensor_parallel_size=replicas.tensor_parallel_size,
        )
    except PitstopError as problem:
        yield error(
            "model", str(problem), why="no replica can serve it", remedy="another model; the README names families"
        )
        return
    yield good("model", f"{folder}, {weights_bytes(folder, settings.dtype) / GIB:.2f} GiB as {settings.dtype}")
    if replicas.num_gpus:
        return
    try:
        check_memory(folder, replicas=replicas.max, ranks=replicas.tensor_parallel_size, dtype=settings.dtype)
    except CommandFailed as problem:
        yield error(
            "memory",
            str(problem),
            why="a replica is killed while it loads or serves",
            remedy="fewer replicas, a smaller model, or dtype: bfloat16",
        )
        return
    # A swap reads the new weights beside the old ones.
    try:
        check_memory(folder, replicas=2 * replicas.max, ranks=replicas.tensor_parallel_size, dtype=settings.dtype)
        yield good("memory", f"enough for {replicas.max} replica(s), and for a swap on all of them")
    except CommandFailed:
        if settings.weights.undo_folder is not None:
            yield good("memory", f"enough for {replicas.max} replica(s); swaps read the weights inside the pause")
            return
        yield warning(
            "memory",
            f"enough for {replicas.max} replica(s), and maybe not for a second copy of their weights",
            why="a swap reads new weights beside the old ones, and is refused where they do not fit",
            remedy="fewer replicas, or weights.undo_folder",
        )


def _hub_model(name: str, environment: Mapping[str, str]) -> Finding:
    offline = [flag for flag in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environment.get(flag) in ("1", "true")]
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return error(
            "model",
            f"{name!r} is neither a folder nor a name that a model of the hub can have",
            why="no replica can load it",
            remedy="correct `model`, or --model",
        )
    if is_cached:
        return good("model", f"{name} of the hub, in its cache")
    if offline:
        return error(
            "model",
            f"{name} is not in the hub's cache, and {offline[0]} is set",
            why="it may not be downloaded",
            remedy=f"unset {offline[0]}, or name a local folder",
        )
    return warning(
        "model",
        f"{name} is not in the hub's cache",
        why="every machine downloads it at its first start, or fails to",
        remedy=f"hf download {name}, or name a local folder",
    )


def _devices(settings: AppSettings) -> Findings:
    import torch

    try:
        check_device(settings.device, num_gpus=settings.replicas.least_gpus)
    except CommandFailed as problem:
        yield error(
            "gpu",
            str(problem),
            why="no replica can start, and Ray waits without end for GPUs that other machines of its cluster lack, too",
            remedy="correct `device` and `replicas`",
        )
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found and not settings.replicas.num_gpus:
        yield warning(
            "gpu", f"{found} are here and none is used", why="the CPU is many times slower", remedy="configs/gpu.yaml"
        )


def _threads(settings: AppSettings, environment: Mapping[str, str]) -> Findings:
    replicas, cores = settings.replicas, available_cores()
    asked = replicas.min * replicas.tensor_parallel_size * replicas.num_cpus
    if asked > cores:
        yield error(
            "cores",
            f"replicas.min asks Ray for {asked:g} CPUs, and {cores} are here",
            why="Ray waits for them without end, unless other machines of the cluster have them",
            remedy="lower replicas.min or replicas.num_cpus",
        )
    threads = replicas.threads()
    total = replicas.max * replicas.tensor_parallel_size * threads
    if replicas.num_gpus or total <= cores:
        yield good("threads", f"{threads} of torch in each of {replicas.max} replica(s) on {cores} cores")
    else:
        yield warning(
            "threads",
            f"{total} of torch in {replicas.max} replica(s) on {cores} cores",
            why="replicas wait for each other in every layer",
            remedy="lower replicas.torch_threads or replicas.max, or leave torch_threads out",
        )
    if (limit := environment.get("OMP_NUM_THREADS")) and limit.isdecimal() and int(limit) < threads:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS is {limit}, below the {threads} of a replica",
            why="compiled attention may get no more threads than that",
            remedy="unset OMP_NUM_THREADS",
        )


def _folders(settings: AppSettings) -> Findings:
    weights = settings.weights
    for setting, place in weights.named_folders.items():
        try:
            check_weight_folder(setting, place)
            yield good(setting, f"{place} can be written")
        except CommandFailed as problem:
            yield error(setting, str(problem), why="no version can be kept there", remedy=f"mkdir -p {place}")
    if weights.folder is None:
        yield warning(
            "weights.folder",
            "none is set",
            why="after a restart of everything the fleet serves the configured model again, not the committed version",
            remedy="weights: {folder: /some/existing/folder}",
        )


def _keys(settings: AppSettings, config: ServeConfig) -> Findings:
    try:
        has_admin_key = settings.admin_key() is not None
        parse_keys(settings.api_keys(), what="API key")
    except ValueError as problem:
        yield error("keys", str(problem), why="the router does not start", remedy="correct the file or the variable")
        return
    yield good("keys", "of the admin: set" if has_admin_key else "of the admin: made by `pitstop serve`")
    if settings.api_keys().is_set:
        yield good("keys", "of users: set")
    elif not _is_loopback(config.host):
        yield warning(
            "keys",
            f"none of users, and the API listens on {config.host}",
            why="everybody who reaches that address may ask, and sees the pit wall",
            remedy="PITSTOP_API_KEYS_FILE, or host: 127.0.0.1 with a gateway before it",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
