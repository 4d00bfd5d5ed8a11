"""The image's recipe: no builder is at hand, so it is linted, and what it relies on in the repository is checked."""

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "k8s" / "Dockerfile"
LINES = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([str(hadolint), str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_file_it_copies_exists_and_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source for line in LINES if line.startswith("COPY ") and "--from=" not in line for source in line.split()[1:-1]
    }
    assert copied == sent
    for source in copied:
        assert (REPOSITORY / source).exists()


def test_every_base_and_every_package_named_is_pinned() -> None:
    arguments = dict(match.groups() for line in LINES if (match := re.fullmatch(r"ARG (\w+)=(\S+)", line)))
    stages = {match[1] for line in LINES if (match := re.fullmatch(r"FROM \S+ AS (\S+)", line))}
    for line in LINES:
        if (base := re.fullmatch(r"FROM (\S+) AS \S+", line)) and base[1] not in stages:
            name, _, tag = base[1].partition(":")
            assert re.search(r"\d+\.\d+\.\d+", arguments[tag.strip("${}")]), f"{name} is not pinned"
    for install in re.findall(r"pip install ([^&]+)", DOCKERFILE.read_text().replace("\\\n", " ")):
        assert "requirements.lock" in install or ".whl" in install or set(re.findall(r"[a-z]+==\S+", install)), install


def test_the_lock_pins_every_dependency_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lock = (REPOSITORY / "requirements.lock").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-").partition("[")[0] for line in lock}
    for dependency in project["dependencies"]:
        assert re.match(r"[\w.-]+", dependency)[0].lower() in pinned  # type: ignore[index]


def test_both_targets_end_as_the_user_that_the_pods_ask_for() -> None:
    for target in ("gpu", "cpu"):
        start = next(index for index, line in enumerate(LINES) if line.endswith(f" AS {target}"))
        end = next((index for index in range(start + 1, len(LINES)) if LINES[index].startswith("FROM ")), len(LINES))
        users = [line for line in LINES[start:end] if line.startswith("USER ")]
        assert users == ["USER 1000:100"]
