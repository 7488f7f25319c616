"""Comparisons side by side, and the storage at several thresholds, on blocks known by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.measure import regime
from layercheck.errors import ConfigError, LayerCheckError
from simulations.comparison import footprint
from simulations.comparison.footprint import K_PER_LR, Footprint, data_sets, footprint_table, k_arms
from simulations.comparison.result import comparison
from simulations.comparison.sizes import draw_sizes, read_comparisons
from simulations.measure import _COMMANDS, main
from tests.unit.test_comparison import ABOUT, BLOCKS, FULL, ours


def _measured(folder: Path, size: str, parameters: int, **changed: Any) -> Path:
    folder.mkdir()
    content = {**comparison(BLOCKS, 20, ABOUT), "size": size, "parameters": parameters, **changed}
    (folder / "comparison.json").write_text(json.dumps(content))
    return folder


def test_sizes_stand_side_by_side_the_smallest_first(tmp_path: Path) -> None:
    folders = [_measured(tmp_path / "l", "large", 32_000_000), _measured(tmp_path / "s", "small", 6_000_000)]
    contents = read_comparisons(folders)
    assert [content["size"] for content in contents] == ["small", "large"]
    text = draw_sizes(contents, tmp_path / "out")
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {
        "end-to-end-every-step", "end-to-end-own", "recovery"
    }  # fmt: skip
    assert "| 6 M parameters | 20 | lowdiff_dense | 4.00 | 2.50 | 13.25 |" in text
    assert "| 32 M parameters | own | layercheck | 20 | 0.000 | 10 | 0.0 | 10 | 1.020 |" in text


def test_a_comparison_that_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    one = _measured(tmp_path / "a", "small", 1)
    with pytest.raises(ConfigError, match="size 'small' is there already"):
        read_comparisons([one, _measured(tmp_path / "b", "small", 1)])
    with pytest.raises(ConfigError, match="format_version 9, known is 1"):
        read_comparisons([_measured(tmp_path / "c", "large", 1, format_version=9)])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_comparisons([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"regimes": {"own": {}}}, r"--from .*/b: it has the regimes \['own'\], --from .*/a \['.*own"),
        ({"regimes": 3}, r"--from .*/b: .*comparison\.json cannot be read"),
        ({"parameters": None}, r"--from .*/b: .*comparison\.json cannot be read"),
        ({"parameters": 0}, r"--from .*/b: .* says parameters=0"),
    ],
)
def test_comparisons_that_do_not_fit_together_are_one_error_that_names_the_folder(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    folders = [_measured(tmp_path / "a", "small", 6), _measured(tmp_path / "b", "large", 9)]
    path = folders[1] / "comparison.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError, match=words):
        read_comparisons(folders)


def test_a_footprint_has_the_figures_of_its_block() -> None:
    found = Footprint.of("bundled", 10.0, ours(0))
    assert (found.bytes_written, found.events, found.layer_writes) == (FULL // 2, 5, 5)
    assert (found.mean_event_bytes, found.mean_interval, found.full_bytes) == (FULL / 10, 20.0, FULL)
    assert footprint_table([found])[-1].startswith("| bundled | 10 | 10 | 0.000 | 5 |")
    with pytest.raises(LayerCheckError, match=r"bundled, K = 10 lr: the block of arm .* says nothing"):
        Footprint.of("bundled", 10.0, replace(ours(0), written=None))


def test_a_data_set_that_the_app_refuses_ends_before_a_rank_runs(tmp_path: Path) -> None:
    class Never:
        def run(self, *_: Any) -> None:
            raise AssertionError("the ranks were asked")

    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(regime.config(str(tmp_path), "layer", 1, "small").resolved()))
    arm = k_arms(quick=True)[K_PER_LR[0]]
    with pytest.raises(ConfigError, match=r"data\.source=''"):
        footprint._run(Never(), config, tmp_path / "runs" / "one", arm, "one", "''")  # type: ignore[arg-type]


def test_data_sets_are_named_after_their_files(tmp_path: Path) -> None:
    path = tmp_path / "medqa.jsonl"
    with pytest.raises(ConfigError, match="there is no such file"):
        data_sets([str(path)])
    path.touch()
    assert data_sets([str(path)]) == {"bundled": "bundled", "medqa": str(path)}
    with pytest.raises(ConfigError, match="'medqa' is there already"):
        data_sets([str(path), str(path)])


def test_each_threshold_is_a_configuration_of_the_app() -> None:
    for k, arm in k_arms(quick=True).items():
        settings = load_config("campaign", (*arm.settings, f"train.steps={arm.steps}")).checkpoint.settings
        assert (settings.k0_per_lr, settings.s_max) == (k, arm.window)


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("saving --size small", "--size"),
        ("saving --from a", "--from"),
        ("footprint --methods none", "--methods"),
        ("footprint --rounds 2", "--rounds"),
        ("footprint --resume", "--resume"),
        ("footprint --seed 0", "--seed"),
        ("sizes --from a --seed 0", "--seed"),
        ("sizes --from a --quick", "--quick"),
        ("sizes --from a --data", "--data"),
        ("methods --data x", "--data"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, flag: str
) -> None:
    what, *given = line.split()
    monkeypatch.setitem(_COMMANDS, what, lambda options: {})  # it would measure for minutes
    assert main([what, "--out", str(tmp_path / "out"), *given]) == 2
    assert capsys.readouterr().err == f"error: {flag} means nothing with {what}: leave it out\n"


@pytest.mark.parametrize(
    "line",
    ["saving --quick", "methods --methods none --rounds 1 --size tiny --resume --seed 3 --quick",
     "footprint --size small --data x --quick", "sizes --from a"],
)  # fmt: skip
def test_flags_of_a_command_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    what, *given = line.split()
    given = [text.replace("tiny", next(iter(regime.SIZES))) for text in given]
    seen: list[Any] = []
    monkeypatch.setitem(_COMMANDS, what, lambda options: seen.append(options) or {})
    assert main([what, "--out", str(tmp_path), *given]) == 0
    assert len(seen) == 1
