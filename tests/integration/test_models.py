"""Models that nobody chose here: by configuration alone they train, die and go on."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.samples import OPENTHOUGHTS
from tests.small_models import SHAPES, make_folder

SETTINGS: dict[str, Any] = {
    "data": {"source": str(OPENTHOUGHTS), "seq_len": 512},
    "train": {"steps": 4, "global_batch": 4, "lr": 1.0e-3, "schedule": "constant"},
    "checkpoint": {
        "settings": {
            "warmup_steps": 2,
            "warmup_full_every": 2,
            "s_max": 12,
            "target_interval": 3,
            "full_every": 0,
        }
    },
    "cluster": {"workers": 2},
    "report_every_s": 1000,
}


def settings_of(storage: str, model: dict[str, Any], steps: int, **more: Any) -> Any:
    from app.config import parse

    train = SETTINGS["train"] | {"steps": steps} | more.pop("train", {})
    return parse({**SETTINGS, "run": {"storage": storage}, "model": model, "train": train, **more})


def train_app(storage: str, model: dict[str, Any], steps: int, **more: Any) -> tuple[list[float], Any]:
    """One life of a run: the losses of its steps and the result."""
    import torch.distributed as dist

    from app import train_loop

    losses: list[float] = []
    reduced = train_loop.mean_over_ranks

    def spy(*arguments: Any) -> Any:
        loss, due = reduced(*arguments)
        losses.append(loss)
        return loss, due

    train_loop.mean_over_ranks = spy
    try:
        config = settings_of(storage, model, steps, **more)
        result = train_loop.train(
            config, rank=dist.get_rank(), world_size=dist.get_world_size(), submission="one"
        )
    finally:
        train_loop.mean_over_ranks = reduced
    return losses, result


def _families(root: str, families: list[str]) -> dict[str, Any]:
    found = {}
    for family in families:
        model = {"path": f"{root}/{family}"}
        whole, _ = train_app(f"{root}/whole-{family}", model, 5)
        first, _ = train_app(f"{root}/parts-{family}", model, 3)
        rest, result = train_app(f"{root}/parts-{family}", model, 5)
        found[family] = (whole, first, rest, result.status)
    return found


@pytest.mark.parametrize("families", [["gpt2", "gemma"], ["gemma3_text", "qwen2_moe"]], ids=" ".join)
def test_a_folder_of_any_family_trains_and_a_second_life_has_the_losses_of_one_that_did_not_end(
    tmp_path: Path, families: list[str]
) -> None:
    for family in families:
        make_folder(tmp_path / family, family, n_positions=512) if family == "gpt2" else make_folder(
            tmp_path / family, family
        )
    for found in run_ranks(2, tmp_path, _families, str(tmp_path), families):
        for family in families:
            whole, first, rest, status = found[family]
            assert status == "completed"
            assert first == whole[:3], family
            assert rest == whole[3:], family
            assert 4.0 < whole[0] < 7.5, "a random model over 512 tokens: about ln 512"
            assert SHAPES[family]
