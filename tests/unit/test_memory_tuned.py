"""The pairs of fine-tuning runs: what is run, and from their final losses to the verdict."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from app.config import load_config
from app.measure.memory import tuned_run
from app.measure.memory.killed import settings_of
from app.measure.memory.spec import KilledRun, Outcome
from layercheck.config import MemoryConfig
from simulations.measure import main
from simulations.memory import run
from simulations.memory.result import tuned_markdown
from simulations.memory.run import tuned_content
from simulations.memory.tuned import (
    FULL,
    GAP,
    QUICK,
    WITHIN_NOISE,
    Extent,
    tuned_figures,
    tuned_pairs,
    tuned_verdicts,
)
from tests.recoveries import outcome, pairs, recovered

# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("extent", [FULL, QUICK])
def test_the_runs_of_a_pair_differ_in_nothing_but_the_kills(extent: Extent) -> None:
    specs = tuned_pairs(extent)
    assert len(specs) >= 2, "a spread needs two seeds"
    assert [one.run_seed for one, _ in specs] == list(range(len(specs)))
    for one, other in specs:
        assert one.kills == ()
        assert one.name != other.name
        assert one == other.model_copy(update={"kills": (), "name": one.name})


def test_three_kills_follow_each_other_and_leave_the_run_its_last_third() -> None:
    for extent in (FULL, QUICK):
        for one, other in tuned_pairs(Extent(extent.base_steps, extent.warmup_steps, extent.steps, 30)):
            assert len(other.kills) == 3
            assert all(later - earlier == GAP for earlier, later in pairwise(other.kills))
            assert extent.warmup_steps + GAP < other.kills[0]
            assert other.kills[-1] <= 2 * extent.steps / 3
            assert (one.what, other.moment) == ("worker", (0.0, 1.0))
    assert len({other.kills for _, other in tuned_pairs(FULL)}) > 1


def test_the_app_reads_a_run_as_a_user_would_fine_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned_run, "make_base", lambda folder, spec: None)
    spec = tuned_pairs(FULL)[1][1]
    assert spec.tuning is not None
    file = tuned_run.prepared(tmp_path / spec.name, spec.tuning)
    config = load_config(file, settings_of(spec, tmp_path / "steps"))
    assert config.model.path == str(tmp_path / f"base-llama-{FULL.base_steps}-hf")
    assert config.data.source == str(tmp_path / "texts" / "train.jsonl")
    train, memory = config.train, config.checkpoint.settings.memory
    assert (config.run.seed, train.steps, config.cluster.workers) == (1, FULL.steps, 2)
    assert train.micro_batch * config.cluster.workers == train.global_batch
    assert (train.schedule, train.min_lr_ratio) == ("cosine", 0.0)
    assert (memory.enabled, memory.k_ratio) == (True, MemoryConfig().k_ratio)


# ---------------------------------------------------------------- figures


def test_a_deviation_is_of_the_run_of_the_same_seed() -> None:
    kills = (recovered(130, lost_steps=2.0), recovered(140, lost_steps=4.0, max_age=7, weighted_age=5.0))
    found = tuned_figures(pairs((4.0, 5.0), (4.06, 4.85), kills))
    assert [pair.deviation for pair in found.pairs] == pytest.approx([0.015, -0.03])
    assert found.mean_deviation == pytest.approx(-0.0075)
    assert found.largest_deviation == pytest.approx(0.03)
    assert found.spread == pytest.approx(0.5**0.5 / 4.5)
    assert (found.base_loss, found.final_loss) == (5.0, 4.5)
    pair = found.pairs[1]
    assert (pair.seed, pair.undisturbed, pair.killed) == (1, 5.0, 4.85)
    assert (pair.killed_after, pair.lost_steps) == ((130, 140), (2.0, 4.0))
    assert (pair.weighted_age, pair.max_age) == ((3.0, 5.0), (4, 7))


@pytest.mark.parametrize(
    ("killed", "is_within"),
    [
        ((3.96, 4.04), True),
        ((4.01, 4.09), True),
        ((4.02, 4.10), False),
        ((3.90, 3.98), False),
        ((4.16, 3.84), True),
    ],
)
def test_within_the_noise_is_said_of_the_mean_either_way(killed: Sequence[float], is_within: bool) -> None:
    """The spread of 3.96 and 4.04 is 1.41 %: deviations of 1.25, 1.5, -1.5 and about 0 in the mean."""
    assert tuned_verdicts(tuned_figures(pairs(killed=killed)))[WITHIN_NOISE] == is_within


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_run_of_a_pair_leaves_in_memory_is_seen(number: int) -> None:
    first, *others = pairs()
    one, other = [run.model_copy(update={"left": int(at == number)}) for at, run in enumerate(first)]
    verdicts = tuned_verdicts(tuned_figures([(one, other), *others]))
    assert [text for text, held in verdicts.items() if not held] == ["nothing is left in shared memory"]


# ---------------------------------------------------------------- page and command


def test_the_page_has_a_row_for_each_seed() -> None:
    content = tuned_content(pairs((3.96, 4.04), (3.98, 4.12), (recovered(130), recovered(140))))
    page = tuned_markdown(json.loads(json.dumps(content)))
    assert "| 0 | 130, 140 | 3.00, 3.00 | 3.00, 3.00 | 4, 4 | 3.9600 | 3.9800 | +0.505 % | 0.50 |" in page
    assert "held-out loss 5.0000 -> 4.0000" in page
    assert "Mean deviation +1.243 %, largest 1.980 %" in page
    assert "without a failure 1.414 %" in page
    assert f"- yes: {WITHIN_NOISE}" in page
    assert list(content["runs"]) == [
        "tuned-0-undisturbed", "tuned-0-killed", "tuned-1-undisturbed", "tuned-1-killed"
    ]  # fmt: skip


def test_the_runs_alone_are_asked_for_of_memory_and_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["memory", "--out", str(tmp_path / "file"), "--tuned"]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
    assert main(["residuals", "--out", "/tmp/never", "--tuned"]) == 2
    assert "--tuned means nothing with residuals" in capsys.readouterr().err
    for other in ("--overhead", "--every-step"):
        assert main(["memory", "--out", "/tmp/never", "--tuned", other]) == 2
        assert f"{other} and --tuned are two measurements" in capsys.readouterr().err


def test_only_the_fine_tuning_runs_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def known(folder: Path, spec: KilledRun, say: object) -> Outcome:
        made.append(spec.name)
        return outcome(spec, held_out=(5.0, 4.0 + spec.run_seed / 100))

    monkeypatch.setattr(run, "outcome_of", known)
    assert main(["memory", "--out", str(tmp_path), "--quick", "--tuned"]) == 0
    assert made == [spec.name for pair in tuned_pairs(QUICK) for spec in pair]
    content = json.loads((tmp_path / "tuned.json").read_text())
    assert content["verdicts"][WITHIN_NOISE]
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "tuned.json", "tuned.md"}
