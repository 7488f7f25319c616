"""The storage of a submitted run means one folder, wherever the job runs."""

from pathlib import Path

import pytest

from cluster.submit import with_absolute_paths, with_absolute_storage
from layercheck.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app" / "configs").mkdir(parents=True)
    (tmp_path / "app" / "configs" / "named.yaml").write_text("run: {storage: elsewhere}\n")
    return tmp_path


def test_a_relative_storage_is_made_absolute_and_stays_alone(folder):
    args = with_absolute_storage(["--storage", "x/y", "--config", "tiny", "--takeover"])
    assert args == ["--config", "tiny", "--takeover", "--storage", f"{folder}/x/y"]
    assert with_absolute_storage(["--storage=x"]) == ["--storage", f"{folder}/x"]


def test_a_uri_stays_as_it_is():
    assert with_absolute_storage(["--storage", "s3://bucket/runs"]) == ["--storage", "s3://bucket/runs"]


def test_without_an_argument_the_configuration_decides(folder):
    assert with_absolute_storage(["--config", "named"])[-1] == f"{folder}/elsewhere"
    assert with_absolute_storage([])[-1] == f"{folder}/runs"
    Path("own.yaml").write_text("run: {storage: /big/disk}\n")
    assert with_absolute_storage(["--config", "own.yaml"])[-1] == "/big/disk"


def test_a_storage_by_set_is_refused_because_it_could_not_be_rewritten():
    with pytest.raises(ConfigError, match="--storage"):
        with_absolute_storage(["--set", "run.storage=x"])


def test_paths_of_a_simulation_are_made_absolute_and_names_stay(folder):
    (folder / "run").mkdir()
    args = with_absolute_paths(["--costs", "run", "--out=results", "--trace", "run", "--law", "run"])
    assert args == [
        "--costs",
        f"{folder}/run",
        f"--out={folder}/results",
        "--trace",
        f"{folder}/run",
        "--law",
        "run",
    ]
    assert with_absolute_paths(["--costs", "paper", "--out"]) == ["--costs", "paper", "--out"]
