"""A process really dies and another one recovers: the distance that is noted is that of the weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.measure.residuals.notes import Notes, distances, read_samples
from app.measure.residuals.spec import KilledRun
from layercheck.coordination import journal
from layercheck.persistence.storage import open_storage
from tests.harness import run_ranks
from tests.integration.test_fidelity_runs import prepare

RUN = KilledRun(
    name="killed",
    seed=1,
    base_steps=1,
    steps=22,
    checkpoint={
        "warmup_steps": 6, "warmup_full_every": 3, "target_interval": 8, "s_max": 40, "full_every": 0,
        "embedding_factor": 1, "failure_aware": False, "metrics_flush_s": 5,
        "residual": {"enabled": True, "k_ratio": 0.25},
    },
    kills=(13, 18),
    sampled=True,
)  # fmt: skip


def _live(folder: str) -> dict[str, Any]:
    """One life; the weights that came back, as this test reads them."""
    from app.measure import fine_tuned
    from app.measure.residuals import life

    base = prepare(folder)
    fine_tuned.make_texts(Path(folder), RUN.tuning)
    fine_tuned.base_folder = lambda *_: base  # type: ignore[assignment]
    back: dict[str, Any] = {}
    begun = life.Watch.begun

    def noting(self: Any, point: Any) -> None:
        begun(self, point)
        zero3 = self._zero3
        for layer, parts in zero3.slices.items():
            for part in parts:
                back[layer, part.spec.name] = zero3.tensors(part)["fp32"].clone().numpy()
        if point.receipt is not None:
            back["receipt"] = point.receipt.model_dump()
            (Path(folder) / f"back-{point.step}.json").write_text(json.dumps(back["receipt"]))
            np.savez(Path(folder) / f"back-{point.step}.npz", **{f"{a}/{b}": v for (a, b), v in _pairs(back)})

    life.Watch.begun = noting  # type: ignore[method-assign]
    life.live(folder, RUN, None)
    return back


def _pairs(back: dict[Any, Any]) -> list[tuple[tuple[str, str], Any]]:
    return [(key, value) for key, value in back.items() if isinstance(key, tuple)]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    for killed in (True, True, False):
        (result,) = run_ranks(1, folder, _live, str(folder))
        assert (result is None) == killed
    return folder


def test_each_life_ends_at_its_kill_and_the_next_one_goes_on(lives: Path) -> None:
    found = Notes(lives / "killed-notes").recoveries()
    assert [one.killed_at for one in found] == list(RUN.kills)
    for one in found:
        assert 0 <= one.killed_at + 1 - one.resume_step <= RUN.kills[0]
        assert one.distance > 0
    facts = journal.load_facts(open_storage(str(lives), "killed"))
    assert len(facts.attempts) == len(RUN.kills) + 1
    assert facts.commits[-1].event.step == RUN.steps
    assert any(commit.bases for commit in facts.commits), "residuals were written"


def test_the_distance_is_between_what_was_lost_and_what_came_back(lives: Path) -> None:
    notes = Notes(lives / "killed-notes")
    for one in notes.recoveries():
        with np.load(lives / f"back-{one.resume_step}.npz") as parts:
            back = {tuple(name.split("/")): parts[name] for name in parts.files}
        lost = notes.lost(one.killed_at)
        assert set(lost) == set(back)
        whole = [np.concatenate([weights[key] for key in sorted(lost)]) for weights in (lost, back)]
        assert one.distance == pytest.approx(float(np.abs(whole[0] - whole[1]).mean()), rel=1e-5)
        assert (one.distance, one.by_layer) == distances(lost, back)  # type: ignore[arg-type]
        receipt = json.loads((lives / f"back-{one.resume_step}.json").read_text())
        assert (one.lost_steps, one.max_age) == (receipt["lost_steps"], receipt["max_age"])
        assert any(layer["residual"] for layer in receipt["layers"])


def test_what_was_lost_is_the_state_of_the_last_step(lives: Path) -> None:
    """The sample of that step is a part of it; that of the step before is not."""
    notes, samples = Notes(lives / "killed-notes"), read_samples(lives / "killed-notes")
    first = RUN.kills[0]
    lost: dict[str, set[float]] = {}
    for (layer, _), values in notes.lost(first).items():
        lost[layer] = lost.get(layer, set()) | set(values.tolist())
    for layer, columns in samples.layers.items():
        assert set(samples.weights[first - 1, columns].tolist()) <= lost[layer]
    embed = samples.layers["embed_tokens"]
    assert not set(samples.weights[first - 2, embed].tolist()) <= lost["embed_tokens"]
