import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.config import Config, load_config
from app.curves import Curves, check_curves
from app.progress import Meter
from layercheck.errors import ConfigError
from layercheck.step_report import StepReport


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_config("tiny", [f"run.storage={tmp_path}", *overrides])


def _events(folder: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of all events files, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_every_step_is_in_the_events_with_its_loss_rate_and_costs(tmp_path: Path) -> None:
    meter = Meter(config(tmp_path, "logging.tensorboard=true"), total_steps=9, rank=0)
    for step in (4, 5):
        meter.begin()
        report = StepReport(step, layers_written=step, max_age=7, stall_s=0.25)
        meter.end(step, loss=step / 2, lr=step / 8, report=report)
    meter.close()
    found = _events(tmp_path / "tiny/tensorboard")
    assert [(step, value) for name, step, value in found if name == "loss"] == [(4, 2.0), (5, 2.5)]
    assert [(step, value) for name, step, value in found if name == "lr"] == [(4, 0.5), (5, 0.625)]
    names = {"loss", "lr", "step_s", "stall_s", "layers_written", "bytes_written", "max_age", "weighted_age"}
    assert {name for name, _, _ in found} == names


def test_only_rank_0_writes_and_only_if_it_is_wanted(tmp_path: Path) -> None:
    assert Curves.of(config(tmp_path, "logging.tensorboard=true"), rank=1) is None
    assert Curves.of(config(tmp_path, "logging.tensorboard=false"), rank=0) is None
    assert Curves.of(config(tmp_path, "logging.wandb=mine", "logging.tensorboard=false"), rank=0) is not None


def test_weights_and_biases_gets_one_run_for_all_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", (step, values["loss"]))),
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**keys: object) -> SimpleNamespace:
        calls.append(("init", (keys["project"], keys["id"], keys["resume"])))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    settings = config(tmp_path, "logging.wandb=mine", "logging.tensorboard=false")
    check_curves(settings)
    for step in (1, 2):
        curves = Curves(settings)
        curves.note(step, {"loss": 0.5 * step})
        curves.close()
    life = [("init", ("mine", "tiny", "allow")), ("log", (1, 0.5)), ("finish", None)]
    assert calls[:3] == life
    assert calls[3:] == [life[0], ("log", (2, 1.0)), life[2]]


@pytest.mark.parametrize(
    ("override", "package"), [("logging.tensorboard=true", "tensorboardX"), ("logging.wandb=mine", "wandb")]
)
def test_a_missing_package_is_one_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"logging\.\w+=.*the package {package}"):
        check_curves(config(tmp_path, override))


def test_no_secret_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def init(**keys: object) -> SimpleNamespace:
        told.append(keys["config"])
        return SimpleNamespace(log=lambda values, step: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    place = "s3://key:a-long-secret@bucket/runs"
    settings = load_config(
        "tiny",
        [f"run.storage={place}", f"data.cache={tmp_path}", "logging.wandb=mine", "logging.tensorboard=false"],
    )
    Curves(settings).note(1, {"loss": 0.5})
    assert "a-long-secret" in settings.run.storage
    assert told
    assert "a-long-secret" not in str(told)
