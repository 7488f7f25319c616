"""The workflow of the public forge: what it runs exists here, and nothing in it moves by itself."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").iterdir())
OFFICIAL = {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
SHELL = {".", "bash", "ensure_venv"}
MADE_BY_THE_JOB = (".venv/bin/", "empty/bin/", "$GITHUB_WORKSPACE/empty/bin/")


def workflow() -> dict[str, Any]:
    (only,) = FILES
    found: dict[str, Any] = yaml.safe_load(only.read_text())
    return found


def steps() -> Iterator[dict[str, Any]]:
    for job in workflow()["jobs"].values():
        yield from job["steps"]


def problems(line: str) -> list[str]:
    """What a line of a `run` would not find in a fresh checkout."""
    words = shlex.split(line)
    program, args = words[0], words[1:]
    found = [] if program in SHELL or program.endswith(("python", "/layercheck")) else [f"program {program}"]
    if "/" in program and not program.startswith(MADE_BY_THE_JOB):
        found.append(f"{program} is made by no step")
    if program in (".", "bash") and not (ROOT / args[0]).is_file():
        found.append(f"file {args[0]}")
    if program == "ensure_venv" and "ensure_venv() {" not in (ROOT / "cluster" / "venv.sh").read_text():
        found.append("function ensure_venv")
    if args[:1] == ["-m"] and importlib.util.find_spec(args[1]) is None:
        found.append(f"module {args[1]}")
    return found


def test_every_command_of_the_workflow_exists() -> None:
    lines = [line for step in steps() for line in step.get("run", "").splitlines()]
    assert {line: problems(line) for line in lines if problems(line)} == {}
    text = "\n".join(lines)
    for wanted in ("ruff check", "ruff format --check", "-m mypy", ".ci/run", "pip wheel"):
        assert wanted in text


@pytest.mark.parametrize(
    "line", ["bash .ci/nothing", "python -m no_such_module", "make test", "other/bin/python -m mypy"]
)
def test_a_command_that_is_not_here_is_found(line: str) -> None:
    assert problems(line)


def test_actions_are_the_forge_s_own_and_pinned_by_major_version() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    for use in used:
        name, _, version = use.partition("@")
        assert name in OFFICIAL
        assert re.fullmatch(r"v\d+", version), use


def test_jobs_may_only_read_and_end_by_themselves() -> None:
    found = workflow()
    assert found["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} == set(found[True]), "YAML 1.1 reads the key `on` as true"
    for job in found["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 60
    assert "secrets." not in FILES[0].read_text()


def test_the_workflow_builds_for_the_oldest_python_that_the_project_names() -> None:
    versions = {step["with"]["python-version"] for step in steps() if "setup-python" in step.get("uses", "")}
    assert versions == {"3.11"}
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text()
