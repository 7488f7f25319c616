"""The commands of the simulation as a person runs them, also where there is no torch, Ray or DeepSpeed."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from simulations import ettr, recommend
from simulations.charges import MEANING
from tests.recorded import record_run

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--costs", "paper", "--points", "3", "--seeds", "3", "--days", "1"]
WITHOUT_HEAVY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "ray", "deepspeed", "transformers"}:
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
from simulations import ettr, recommend, regret, replay
out, run = sys.argv[1:]
small = ["--points", "2", "--seeds", "2", "--days", "1"]
codes = [
    ettr.main(["--costs", "paper", "--out", out, "--no-pictures", *small]),
    recommend.main(["--costs", "paper", "--trace", run, "--mtbf-h", "1"]),
    replay.main(["--trace", run, "--out", out, "--targets", "12", "--s-max", "48"]),
    regret.main(["--out", out, "--steps", "200", "--s-max", "5", "--no-pictures"]),
]
print("codes", codes, sorted({"torch", "ray", "deepspeed"} & sys.modules.keys()))
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_everything_runs_without_torch_ray_and_deepspeed(tmp_path):
    record_run(tmp_path / "run", steps=60)
    command = [sys.executable, "-c", WITHOUT_HEAVY, str(tmp_path / "out"), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "codes [0, 0, 0, 0] []" in done.stdout, done.stdout + done.stderr


def test_a_sweep_leaves_table_pictures_and_crossovers(tmp_path, capsys):
    assert ettr.main([*SMALL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "matched:" in said
    assert "own optimum:" in said
    assert "/steps between two saves" in said
    assert "million failures a second" in said
    rows = pq.read_table(tmp_path / "ettr.parquet").to_pylist()
    assert len(rows) == 3 * 2 * 3
    assert {row["source"] for row in rows} == {"paper"}
    assert {round(row["mtbf_h"], 4) for row in rows} == {0.01, 0.1732, 3.0}
    assert json.loads((tmp_path / "ettr.json").read_text())["seeds"] == 3
    for name in ("ettr.png", "ettr.svg", "ettr-breakdown.png", "ettr-breakdown.svg"):
        assert (tmp_path / name).stat().st_size > 1000, name


def test_the_same_command_gives_the_same_numbers(tmp_path):
    for name in ("a", "b"):
        assert ettr.main([*SMALL, "--out", str(tmp_path / name), "--no-pictures"]) == 0
    first, second = (pq.read_table(tmp_path / name / "ettr.parquet") for name in ("a", "b"))
    assert first.equals(second)
    assert not (tmp_path / "a" / "ettr.png").exists()


def test_a_cluster_is_swept_from_eight_to_131072_devices(tmp_path):
    options = ["--cluster", "--rate", "rsc2", "--mix", "llama3", "--no-pictures", "--out", str(tmp_path)]
    assert ettr.main([*SMALL, *options]) == 0
    rows = [
        row for row in pq.read_table(tmp_path / "cluster.parquet").to_pylist() if row["method"] == "gemini"
    ]
    sizes = sorted({row["gpus"] for row in rows})
    assert (sizes[0], sizes[-1], len(sizes)) == (8, 131072, 15)
    assert {round(row["mtbf_h"] * row["gpus"] / 8) for row in rows} == {round(24_000 / 2.34)}
    assert json.loads((tmp_path / "cluster.json").read_text())["mix"] == pytest.approx(
        [63 / 419, 321 / 419, 35 / 419]
    )


def test_tiers_leave_who_is_ahead_where_and_why(tmp_path, capsys):
    assert ettr.main([*SMALL, "--points", "2", "--tiers", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "layercheck_memory_each_step: " in said
    found = json.loads((tmp_path / "ettr-tiers.json").read_text())
    mine = found["charges"]["stalls"]
    assert len(mine["winners"]) == 2
    assert len(mine["against_interval_methods"]) == 2 * 5
    assert json.loads((tmp_path / "ettr.json").read_text())["mix"] == pytest.approx(
        [63 / 419, 321 / 419, 35 / 419]
    )
    text = (tmp_path / "ettr-tiers.md").read_text()
    assert "Failures: process 15.0 %, node 76.6 %, cluster 8.4 %, exponential." in text
    assert (tmp_path / "ettr-tiers-stalls.png").stat().st_size > 1000
    names = {row["method"] for row in pq.read_table(tmp_path / "ettr.parquet").to_pylist()}
    assert names == {row["method"] for row in mine["points"]}


RATIOS = ["--step-ratio", "gemini=1.07", "lowdiff=0.9", "versions=1.2"]
"""As if they had been measured."""


def test_of_tiers_the_mix_the_replicas_and_the_measured_ratios_are_the_users(tmp_path, capsys):
    options = ["--same-restart", "--mix", "0.2,0.5,0.3", "--no-replicas", "--no-pictures", *RATIOS]
    assert ettr.main([*SMALL, "--points", "2", "--tiers", *options, "--out", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "ettr.json").read_text())
    assert (settings["mix"], settings["charge"]) == ([0.2, 0.5, 0.3], "stalls")
    found = json.loads((tmp_path / "ettr-tiers.json").read_text())
    assert list(found["charges"]) == ["stalls", "slowdown"]
    assert not any(one["replicas"] for one in found["tiers"])
    assert not list(tmp_path.glob("ettr-tiers*.png"))
    ratios = {one["name"]: one["ratio"] for one in found["events"] if one["ratio"]}
    assert ratios == pytest.approx({"gemini": 1.07, "lowdiff": 0.9, "layercheck: versions": 1.2})
    text = (tmp_path / "ettr-tiers.md").read_text()
    assert "| lowdiff | 430.65 | 0.900 | 430.65 | a ratio below 1 is noise: visible stall |" in text
    for name in ("stalls", "slowdown"):
        assert f"# Charge: {name}\n\n{MEANING[name]}" in text
    assert "charged by slowdown, lost progress too" in capsys.readouterr().out


def test_the_charge_that_is_asked_for_is_the_one_of_the_table(tmp_path):
    rows = {}
    for charge in ("stalls", "slowdown"):
        options = ["--charge", charge, "--no-pictures", *(RATIOS if charge == "slowdown" else ())]
        options += ["gemini=9"] if charge == "slowdown" else []
        assert ettr.main([*SMALL, *options, "--out", str(tmp_path / charge)]) == 0
        assert json.loads((tmp_path / charge / "ettr.json").read_text())["charge"] == charge
        table = pq.read_table(tmp_path / charge / "ettr.parquet").to_pylist()
        rows[charge] = {(row["method"], row["protocol"], row["mtbf_h"]): row for row in table}
    for key, row in rows["slowdown"].items():
        stalls_s = [rows[charge][key]["stall_per_commit_s"] for charge in ("stalls", "slowdown")]
        assert (stalls_s[1] > stalls_s[0]) == (row["method"] == "gemini"), key


def test_a_recommendation_is_printed_and_written(tmp_path, capsys):
    options = ["--costs", "paper", "--nodes", "1024", "--rate", "llama3", "--out", str(tmp_path)]
    assert recommend.main(options) == 0
    content = json.loads((tmp_path / "recommend.json").read_text())
    assert content["gpus"] == 8192
    assert content["mtbf_s"] == pytest.approx(86_400_000 / (3.79 * 1024))
    assert content["reason"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "arguments", "named"),
    [
        (ettr.main, ["--costs", "paper", "--mtbf-h", "0", "3"], "mtbf_h=0"),
        (ettr.main, ["--costs", "paper", "--mtbf-h", "nan", "3"], "mtbf_h=nan"),
        (ettr.main, ["--costs", "absent.json"], "absent.json"),
        (ettr.main, ["--costs", "paper", "--law", "weibull"], "law='weibull'"),
        (ettr.main, ["--costs", "paper", "--seeds", "0"], "seeds=0"),
        (ettr.main, ["--costs", "paper", "--mix", "0.5,0.2,0.2"], "mix="),
        (ettr.main, ["--costs", "paper", "--repair", "0", "1"], "repair mean_s=0"),
        (ettr.main, ["--costs", "paper", "--no-replicas"], "--no-replicas means nothing without --tiers"),
        (ettr.main, ["--costs", "paper", "--step-ratio", "memory=2"], "--step-ratio means nothing"),
        (ettr.main, ["--costs", "paper", "--tiers", "--step-ratio", "memory"], "step-ratio 'memory'"),
        (ettr.main, ["--costs", "paper", "--tiers", "--step-ratio", "x=2"], "step-ratio 'x' is none of"),
        (ettr.main, ["--costs", "paper", "--charge", "slowdown"], "ratio of versions, lowdiff, gemini"),
        (ettr.main, ["--costs", "paper", "--no-replicas"], "--no-replicas means nothing"),
        (recommend.main, ["--costs", "paper", "--mtbf-h", "0"], "mtbf_h=0"),
        (recommend.main, ["--costs", "paper"], "--mtbf-h, or --nodes"),
        (recommend.main, ["--costs", "paper", "--mtbf-h", "1", "--trace", "absent"], "holds no run"),
        (
            recommend.main,
            ["--costs", "paper", "--mtbf-h", "1", "--max-lost-percent", "-1"],
            "max_lost_percent=-1",
        ),
    ],
)
def test_wrong_input_is_one_line_that_names_the_value(tmp_path, capsys, main, arguments, named):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert named in said
    assert "\n" not in said
