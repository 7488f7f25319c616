from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, TrainingFailedError

from app import train
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


class Controllers:
    """Ends of the controllers of one submission, one after the other; the last one trains to the end."""

    def __init__(self, *ends: Exception) -> None:
        self.ends = list(ends)
        self.numbers: list[int] = []

    def next(self, config: object, submission: str, takeover: bool, number: int) -> SimpleNamespace:
        self.numbers.append(number)
        return SimpleNamespace(fit=self.fit)

    def fit(self) -> SimpleNamespace:
        if self.ends:
            raise self.ends.pop(0)
        return SimpleNamespace(return_value={"status": "completed"}, checkpoint=SimpleNamespace(path="/m"))


def died_in_start() -> TrainingFailedError:
    """What Ray Train 2.60 raises for a worker that dies between its creation and its train function."""
    return ControllerError(ActorDiedError())


def test_a_worker_that_dies_while_its_group_is_started_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    controllers = Controllers(died_in_start(), died_in_start())
    monkeypatch.setattr(train, "_trainer", controllers.next)
    returned = train._fit_until_started(load_config("tiny", ["cluster.max_failures=2"]), "s", False)
    assert returned == {"status": "completed", "model": "/m"}
    assert controllers.numbers == [0, 1, 2], "each under a name of its own: Ray reads what it finds under one"


def test_the_place_of_the_model_is_a_path_or_a_uri_like_that_of_the_run() -> None:
    checkpoint = SimpleNamespace(path="bucket/runs/x/ray/checkpoint_0")
    assert train._place_of(checkpoint, "s3://bucket/runs/x") == "s3://bucket/runs/x/ray/checkpoint_0"
    assert train._place_of(SimpleNamespace(path="/runs/x/ray/c"), "/runs/x") == "/runs/x/ray/c"
    assert train._place_of(None, "/runs/x") is None


@pytest.mark.parametrize(
    ("limit", "error", "tries"),
    [
        (1, died_in_start(), 2),
        (0, died_in_start(), 1),
        (-1, ControllerError(ValueError("a bug")), 1),
        (-1, TrainingFailedError("workers"), 1),
    ],
)
def test_starts_have_a_limit_and_other_errors_are_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, limit: int, error: TrainingFailedError, tries: int
) -> None:
    controllers = Controllers(error, error, error)
    monkeypatch.setattr(train, "_trainer", controllers.next)
    with pytest.raises(TrainingFailedError):
        train._fit_until_started(load_config("tiny", [f"cluster.max_failures={limit}"]), "s", False)
    assert len(controllers.numbers) == tries
