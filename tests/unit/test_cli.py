"""The `layercheck` command on real stores: JSON keys, exit codes, what it finds and what it leaves alone."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layercheck.cli import main
from layercheck.commands import gc as gc_command
from layercheck.commands.gc import gc
from layercheck.commands.store import open_both, split
from layercheck.coordination.facts import versions_of
from layercheck.errors import RunIsLiveError
from layercheck.manifest import EventId
from tests.fakes import Clock, flip_bit
from tests.stores import RealRun, real_run

ROOT = Path(__file__).resolve().parents[2]
NEWEST = {"embed_tokens": 4, "layers.0": 12, "norm": 10}


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    code = main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out or "null")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shard(run: RealRun, step: int, rank: int) -> Path:
    return run.folder / EventId(step=step, attempt=1).shard_file(rank)


# ---------------------------------------------------------------- status


@pytest.mark.parametrize("below", ["", "layercheck", "layercheck/"])
def test_status_has_the_keys_of_the_contract_from_either_folder(
    run: RealRun, capsys: pytest.CaptureFixture[str], below: str
) -> None:
    code, value = ask(capsys, "status", str(run.folder.parent / below))
    assert code == 0
    assert list(value) == [
        "run", "attempt", "step", "world_size", "layers", "max_age", "weighted_age", "lost_steps",
        "lost_drift", "measure", "if_dies", "recoverable", "read_bytes",
    ]  # fmt: skip
    assert list(value["layers"][0]) == [
        "name", "step", "attempt", "age", "residual", "lost", "lost_drift", "if_dies", "nbytes", "drift",
        "threshold", "reason",
    ]  # fmt: skip
    assert (value["run"], value["attempt"], value["step"], value["world_size"]) == ("r1", 1, 14, 2)
    assert {layer["name"]: layer["step"] for layer in value["layers"]} == NEWEST
    assert {layer["name"]: layer["age"] for layer in value["layers"]} == {
        name: 14 - step for name, step in NEWEST.items()
    }
    assert value["max_age"] == 10
    assert value["weighted_age"] == pytest.approx((10 * 10 + 20 * 2 + 30 * 4) / 60)
    assert value["lost_steps"] == value["weighted_age"]
    assert value["lost_drift"] is None, "this coordinator's ranks say nothing of it"
    assert value["read_bytes"] == 60 * 4
    assert value["recoverable"] is True


def test_status_for_a_person_names_every_layer(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.folder)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NEWEST)
    assert "oldest layer 10 steps" in text
    assert "warm-up" not in text


def test_status_of_a_run_in_its_warm_up_says_where_a_restart_goes_back_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RealRun(tmp_path / "warm")
    run.beat(0)
    run.save(0)
    run.save(2)
    run.train(3)
    run.coordinator.close()
    assert main(["status", str(run.folder)]) == 0
    assert (
        "in the warm-up: a restart goes back to the newest full copy and runs from step 3\n"
        in capsys.readouterr().out
    )


def test_watching_ends_when_the_run_has_completed(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.end()
    assert main(["status", str(run.folder), "--watch"]) == 0
    assert "completed" in capsys.readouterr().out


def test_a_layer_that_is_due_whatever_it_did_has_no_number_in_json(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder / "attempts/a001.progress.json").unlink()
    code, value = ask(capsys, "status", str(run.folder))
    assert code == 0
    assert None in [layer["drift"] for layer in value["layers"]]


@pytest.mark.parametrize("below", ["", "/", "/layercheck", "/layercheck/"])
@pytest.mark.parametrize(
    ("folder", "query"), [("s3://bucket/runs", ""), ("s3://bucket/runs", "?endpoint_override=http://h:1/x")]
)
def test_a_store_is_the_run_folder_or_the_one_inside_also_as_a_uri(
    folder: str, query: str, below: str
) -> None:
    assert split(f"{folder}/r1{below}{query}") == (folder, "r1", query)


def test_a_local_store_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split("r1") == split("r1/layercheck") == (str(tmp_path), "r1", "")
    monkeypatch.chdir(tmp_path.parent)
    assert split(f"{tmp_path.name}/./layercheck") == (str(tmp_path.parent), tmp_path.name, "")


# ---------------------------------------------------------------- plan


def test_plan_has_the_keys_of_the_contract(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = ask(capsys, "plan", str(run.folder))
    assert code == 0
    assert list(value) == [
        "mode", "t_fail", "t_fail_source", "resume_step", "world_size", "max_age", "weighted_age",
        "lost_steps", "lost_drift", "measure", "nbytes", "layers",
    ]  # fmt: skip
    assert list(value["layers"][0]) == [
        "name", "step", "attempt", "age", "residual", "lost", "lost_drift", "nbytes", "files", "fallback",
    ]  # fmt: skip
    assert (value["mode"], value["t_fail"], value["t_fail_source"]) == ("composite", 14, "journal")
    assert value["resume_step"] == 15
    assert value["layers"][1]["files"] == [EventId(step=12, attempt=1).shard_file(rank) for rank in (0, 1)]


def test_plan_answers_what_if(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(run.folder)
    steps = lambda value: {layer["name"]: layer["step"] for layer in value["layers"]}  # noqa: E731
    assert steps(ask(capsys, "plan", store, "--at-step", "9")[1]) == NEWEST | {"layers.0": 8, "norm": 4}
    assert set(steps(ask(capsys, "plan", store, "--mode", "uniform")[1]).values()) == {4}
    assert ask(capsys, "plan", store, "--mode", "strict", "--max-age", "10")[1]["resume_step"] == 15
    assert ask(capsys, "plan", store, "--world-size", "7")[1]["world_size"] == 7
    for name in (str(shard(run, 12, 1)), str(shard(run, 12, 1).relative_to(run.folder))):
        _, without = ask(capsys, "plan", store, "--without", name)
        assert steps(without) == NEWEST | {"layers.0": 8}
    assert [layer["fallback"] for layer in without["layers"]] == [False, True, False]
    folders = ["events/step-00000012.a001", "events/step-00000010.a001"]
    _, without = ask(capsys, "plan", store, "--without", *folders)
    assert steps(without) == {"embed_tokens": 4, "layers.0": 8, "norm": 4}


def test_plan_exits_with_1_where_there_is_none_and_names_the_layers(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode, knob in (("composite", "max_age=9"), ("strict", "strict_max_age=9")):
        assert main(["plan", str(run.folder), "--mode", mode, "--max-age", "9"]) == 1
        told = capsys.readouterr().err
        assert f"{knob}: embed_tokens (10 steps)" in told
    assert main(["plan", str(run.folder), "--at-step", "15"]) == 1
    assert "has come to step 14" in capsys.readouterr().err


def test_plan_says_if_it_is_of_an_earlier_step_than_was_asked(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run.folder), "--at-step", "9", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["t_fail"] == 8
    assert "no trainer state of step 9 is kept: this is the plan of step 8" in told.err


def test_i7_status_of_a_run_without_commits_exits_with_1(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for commit in run.folder.glob("events/*/commit.parquet"):
        commit.unlink()
    assert ask(capsys, "status", str(run.folder))[0] == 1
    assert main(["plan", str(run.folder)]) == 1
    assert "embed_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["status", "nowhere"],
        ["status", "what://is/this"],
        ["status"],
        ["plan", "STORE", "--world-size", "0"],
        ["plan", "STORE", "--mode", "best"],
        ["plan", "STORE", "--mode", "strict"],
        ["plan", "STORE", "--without", "events/step-00000099.a001"],
        ["dance", "STORE"],
    ],
)
def test_wrong_usage_exits_with_2(run: RealRun, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    try:
        code = main([str(run.folder) if arg == "STORE" else arg for arg in args])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert capsys.readouterr().err


def test_commands_change_nothing_but_for_gc(run: RealRun) -> None:
    before = files(run.folder)
    for args in (["status"], ["plan"], ["verify"], ["gc", "--dry-run"]):
        assert main([args[0], str(run.folder), *args[1:]]) == 0
    assert files(run.folder) == before


# ---------------------------------------------------------------- verify


def test_i6_verify_reads_every_live_shard(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, value = ask(capsys, "verify", str(run.folder))
    live = [
        version for commit in open_both(str(run.folder)).facts().commits for version in versions_of(commit)
    ]
    assert code == 0
    assert value == {
        "checked": 2 * len(live),
        "nbytes": sum(version.nbytes for version in live),
        "bad": [],
    }
    assert len(live) >= 6


@pytest.mark.parametrize("place", ["header", "data", "end", "missing", "swapped"])
def test_i6_verify_finds_what_happened_to_one_file(
    run: RealRun, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = shard(run, 12, 1)
    content = path.read_bytes()
    if place == "header":
        flip_bit(path, 8 * content.index(b"fp32"))
    elif place == "data":
        flip_bit(path, 8 * (len(content) - 1))
    elif place == "end":
        path.write_bytes(content[:-1])
    elif place == "missing":
        path.unlink()
    else:
        path.write_bytes(shard(run, 12, 0).read_bytes())
    code, value = ask(capsys, "verify", str(run.folder))
    assert code == 1
    file = str(path.relative_to(run.folder))
    assert [(bad["file"], bad["layer"], bad["step"]) for bad in value["bad"]] == [(file, "layers.0", 12)]
    assert value["bad"][0]["error"]


def test_i6_verify_announces_a_commit_that_counts_as_absent(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = run.folder / EventId(step=10, attempt=1).commit_file
    commit.write_bytes(commit.read_bytes()[:-9])
    code, value = ask(capsys, "verify", str(run.folder))
    assert code == 1
    assert [(bad["layer"], bad["step"]) for bad in value["bad"]] == [("", 10)]
    assert "counts as absent" in value["bad"][0]["error"]


# ---------------------------------------------------------------- gc


def test_i5_gc_dry_run_says_what_would_go_and_why(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.storage.write("events/step-00000013.a001/rank-00000.safetensors", [b"12345"])
    code, value = ask(capsys, "gc", str(run.folder), "--dry-run")
    assert code == 0
    assert list(value) == ["delete", "keep"]
    kept = {row["event"]: row for row in value["keep"]}
    assert kept["events/step-00000013.a001"] == {
        "event": "events/step-00000013.a001", "nbytes": 5, "reason": "being written",
    }  # fmt: skip
    assert kept["events/step-00000004.a001"]["reason"] == "full event"
    assert all(row["nbytes"] > 0 and row["reason"] for row in (*value["keep"], *value["delete"]))


def test_i5_gc_deletes_what_a_crash_left_behind_and_keeps_the_plan(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    _, planned = ask(capsys, "plan", str(run.folder))
    RealRun(run.folder.parent, token="t2").end("failed", "killed")
    run.storage.write("events/step-00000014.a001/rank-00000.safetensors", [b"orphan"])
    code, value = ask(capsys, "gc", str(run.folder))
    assert code == 0
    assert [(row["event"], row["nbytes"]) for row in value["delete"]] == [("events/step-00000014.a001", 6)]
    assert not (run.folder / "events/step-00000014.a001").exists()
    _, after = ask(capsys, "plan", str(run.folder))
    lost = dict.fromkeys(("lost", "lost_drift"))  # counts from the newest attempt
    assert [one | lost for one in after["layers"]] == [one | lost for one in planned["layers"]]


def test_gc_refuses_while_the_progress_file_changes(run: RealRun) -> None:
    clock, beats = Clock(), iter(range(15, 100))
    before = files(run.folder / "events")

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 1004:  # the fifth second of the watch: slower than a step, as fast as a heartbeat
            run.beat(next(beats))
            run.coordinator.close()

    with pytest.raises(RunIsLiveError, match="r1 is live"):
        gc(open_both(str(run.folder)), dry_run=False, clock=clock, sleep=sleep)
    assert files(run.folder / "events") == before


def test_gc_watches_a_silent_run_for_ten_seconds(run: RealRun) -> None:
    clock = Clock()
    gc(open_both(str(run.folder)), dry_run=False, clock=clock, sleep=clock.sleep)
    assert clock.now - 1000.0 >= gc_command.WATCH_S == 10.0


def test_i13_gc_refuses_after_a_non_finite_state(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.end("failed", "NonFiniteStateError: step 14: the loss is not finite")
    before = files(run.folder)
    assert main(["gc", str(run.folder)]) == 1
    assert "non-finite" in capsys.readouterr().err
    assert files(run.folder) == before


def test_i13_gc_refuses_while_a_recovery_is_on_probation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = real_run(tmp_path / "r2", probation_steps=20)
    RealRun(tmp_path / "r2", token="t2", probation_steps=20).end("failed", "killed")
    assert main(["gc", str(run.folder)]) == 1
    assert "on probation until step 34" in capsys.readouterr().err


# ---------------------------------------------------------------- the process


def test_the_command_loads_neither_torch_nor_ray_and_starts_within_a_second(run: RealRun) -> None:
    code = (
        "import sys; from layercheck.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'ray', 'deepspeed', 'transformers'} & sys.modules.keys())); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "status", str(run.folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < 1.5, "CPU seconds; on a quiet machine 0.5"
