"""The main promise on a real cluster: a worker is killed, training goes on at the next step."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from app.bundled import rows
from cluster.campaign_checks import Judge
from cluster.head import PrivateHead, start_head
from cluster.locks import prepare_extensions
from simulations.replay_policy import compare
from simulations.trace import read_trace
from tests.e2e.deaths import COORDINATOR, kill, process_of
from tests.e2e.runs import (
    ROOT,
    committed_versions,
    finish,
    metrics,
    progress_step,
    start_app,
    summary,
    wait_until,
)
from tests.samples import MEDQA

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
KILL_STEP = 22
STEPS = 30


@pytest.fixture(scope="module")
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=6) as started:
        yield started


@pytest.fixture(scope="module")
def killed(head: PrivateHead, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 30 steps that began with a stale extension lock and met three kills.

    The coordinator was killed in training, rank 1 after a step, and the coordinator again in the recovery.
    """
    storage = tmp_path_factory.mktemp("storage")
    (op,) = Path(prepare_extensions(storage / "killed")["TORCH_EXTENSIONS_DIR"]).glob("deepspeed_*")
    (op / "lock").touch()
    run = storage / "killed"
    faults = {"faults.kill": f"[{{rank: 1, step: {KILL_STEP}}}]", "faults.witness": run / "witness"}
    process = start_app(head, storage, "killed", **faults)
    wait_until(lambda: progress_step(run, 1) >= 4, process)
    kill(process_of(head, COORDINATOR))
    wait_until(lambda: any(run.glob("layercheck/attempts/a002*")), process)
    kill(process_of(head, COORDINATOR))
    code, output = finish(process)
    assert code == 0, output[-4000:]
    return run


def test_nothing_was_lost_or_wrong_and_every_step_was_run_once(killed):
    judge = Judge(killed / "layercheck", killed / "witness")
    judge.finish()
    assert judge.verdict.problems == []
    assert judge.verdict.compared > 2 * 8, "both ranks, all layers"
    assert 0 < judge.verdict.max_age <= 16


def test_a_killed_rank_costs_no_step(killed):
    found = summary(killed)
    assert found["status"] == "completed"
    assert found["injected"] == [{"rank": 1, "step": KILL_STEP}]
    assert (found["attempts"], found["failures"], found["steps"]) == (2, 1, STEPS)
    (resumed,) = found["resumed"]
    assert resumed["t_fail"] in (KILL_STEP, KILL_STEP - 1)
    assert resumed["resume_step"] == resumed["t_fail"] + 1
    assert resumed["mode"] == "composite"


def test_the_loss_goes_on_where_it_was(killed):
    # The rows that were not flushed when the group died are gone, at most a few.
    rows = [(row["step"], row["attempt"], row["loss"]) for row in metrics(killed) if row["step"] > 0]
    losses = {step: loss for step, _, loss in rows}
    assert len(losses) == len(rows)
    resumed_at = summary(killed)["resumed"][0]["resume_step"]
    assert [step for step, attempt, _ in rows if attempt == 2] == list(range(resumed_at, STEPS + 1))
    before = mean(loss for step, loss in losses.items() if KILL_STEP - 6 <= step < resumed_at)
    after = mean(losses[step] for step in range(KILL_STEP + 1, KILL_STEP + 6))
    start = mean(losses[step] for step in range(1, 4))
    assert after < before + 0.2 * (start - before), f"start {start}, before {before}, after {after}"


def test_the_replay_decides_as_the_run_did_up_to_the_kill(killed):
    same = compare(read_trace(str(killed)))
    assert (same.different, same.first) == (0, "")
    assert same.steps > 8 + 5, "steps beyond the warm-up, which selects nothing"


def test_the_ages_in_the_receipt_equal_what_the_commits_say(killed):
    receipt = json.loads((killed / "layercheck" / "attempts" / "a002.receipt.json").read_text())
    t_fail = receipt["t_fail"]
    versions = committed_versions(killed)
    assert receipt["layers"]
    for layer in receipt["layers"]:
        steps = [
            step
            for name, step, attempt in versions
            if name == layer["name"] and attempt == 1 and step <= t_fail
        ]
        assert (layer["step"], layer["attempt"]) == (max(steps), 1), layer
        assert layer["age"] == t_fail - layer["step"], layer
    assert summary(killed)["resumed"][0]["ages"] == {
        layer["name"]: layer["age"] for layer in receipt["layers"]
    }


@pytest.mark.slow
def test_the_same_name_again_continues_the_run_with_all_ages_zero(head, killed):
    more = {"train.steps": STEPS + 3, "faults.witness": killed / "witness"}
    code, output = finish(start_app(head, killed.parent, "killed", **more))
    assert code == 0, output[-4000:]
    found = summary(killed)
    assert found["steps"] == STEPS + 3
    resumed = found["resumed"][-1]
    assert resumed["resume_step"] == STEPS + 1
    assert set(resumed["ages"].values()) == {0}


def test_the_run_exports_to_a_model_with_its_tokenizer(killed, tmp_path):
    out = tmp_path / "model"
    command = [sys.executable, "-m", "layercheck.cli", "export", str(killed), "--to", "hf", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(tokenizer) <= model.config.vocab_size
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(model.config)
    answers = [row["conversations"][1]["value"] for row in rows()[:20]]
    batches = [tokenizer(answer, return_tensors="pt").input_ids for answer in answers]
    with torch.no_grad():
        trained, untrained = (
            mean(float(each(ids, labels=ids).loss) for ids in batches) for each in (model, fresh)
        )
    assert trained < untrained - 0.1


def test_the_model_that_ray_keeps_is_the_one_of_the_store_and_can_be_scored(killed, tmp_path):
    from safetensors.torch import load_file

    model = Path(summary(killed)["model"])
    assert model.is_relative_to(killed / "ray"), "RunConfig(storage_path)"
    out = tmp_path / "model"
    store = ["layercheck.cli", "export", str(killed), "--to", "hf", "--dtype", "bfloat16", "--out", str(out)]
    scores = tmp_path / "scores.json"
    score = ["app.evaluate", "--model", str(model), "--data", str(MEDQA), "--json", str(scores)]
    for command in (store, score):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert mine.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in mine.items())
    assert json.loads(scores.read_text())["rows"] == 12
    assert any((killed / "tensorboard").iterdir()), "tiny.yaml asks for curves"


@pytest.mark.slow
def test_a_live_run_is_refused_and_a_takeover_ends_it_without_a_retry(head, tmp_path):
    first = start_app(head, tmp_path, "live", **{"train.steps": 100_000})
    second = third = None
    try:
        wait_until(lambda: progress_step(tmp_path / "live", 1) >= 2, first)
        second = start_app(head, tmp_path, "live", **{"train.steps": 100_000})
        code, output = finish(second)
        assert code == 1, output[-4000:]
        assert re.search(r"run live is live \(step \d+, moving\); end it or pass --takeover", output)
        assert first.poll() is None
        third = start_app(head, tmp_path, "live", "--takeover", **{"train.steps": 100_000})
        code, output = finish(first)
        assert code == 3, output[-4000:]
        assert "[FailurePolicy] RETRY" not in output
        wait_until(lambda: progress_step(tmp_path / "live", 2) >= 1, third)
    finally:
        for process in (first, second, third):
            if process is not None:
                process.kill()
                process.wait(30)
        _stop_jobs(head)


def _stop_jobs(head: PrivateHead) -> None:
    stop = (
        "import sys; from ray.job_submission import JobSubmissionClient as C; c = C(sys.argv[1]); "
        "[c.stop_job(j.submission_id) for j in c.list_jobs() if j.submission_id and j.status == 'RUNNING']"
    )
    env = {**os.environ, **head.env, "RAY_ADDRESS": head.dashboard}
    subprocess.run([sys.executable, "-c", stop, head.dashboard], env=env, timeout=60, check=True)
