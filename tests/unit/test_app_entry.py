from pathlib import Path

import pytest
import ray

from app.config import load_config
from app.train import check_cluster, check_input, main
from layercheck.errors import ConfigError


def test_more_workers_than_the_cluster_can_place_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    check_cluster(load_config("tiny", ["cluster.workers=2"]))
    with pytest.raises(ConfigError, match=r"cluster\.workers=4 with 1 CPUs each need 4, the cluster has 3"):
        check_cluster(load_config("tiny", ["cluster.workers=4"]))
    check_cluster(load_config("tiny", ["cluster.workers=4", "cluster.min_workers=1", "train.micro_batch=1"]))
    with pytest.raises(ConfigError, match=r"cluster\.min_workers=4 with 1 CPUs each need 4"):
        check_cluster(load_config("tiny", ["cluster.workers=4", "cluster.min_workers=4"]))
    with pytest.raises(ConfigError, match="GPU"):
        check_cluster(load_config("tiny", ["cluster.gpus_per_worker=1"]))


def test_wrong_faults_are_found_before_training(tmp_path: Path) -> None:
    storage = f"run.storage={tmp_path}"
    with pytest.raises(ConfigError, match="step=0"):
        check_input(load_config("tiny", [storage, "faults.kill=[{rank: 0, step: 0}]"]))
    with pytest.raises(ConfigError, match=r"cluster\.workers=2"):
        load_config("tiny", [storage, "faults.kill=[{rank: 2, step: 5}]"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--config", "absent"], 2, "known names"),
        (["--config", "tiny", "--set", "train.bogus=1"], 2, "train.bogus"),
        (["--config", "tiny", "--set", "data.source=absent.jsonl"], 2, "absent.jsonl"),
        (["--config", "tiny", "--storage", "/proc/absent"], 1, "run.storage"),
    ],
)
def test_bad_input_ends_with_one_line_before_any_cluster_is_started(
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def no_cluster(*_: object, **__: object) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(ray, "init", no_cluster)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert words in errors[0]
