"""What KubeRay does with the RayJob of `cluster/deploy/kuberay/train.yaml`, without Kubernetes.

A retry of `backoffLimit` removes the cluster and submits the same entrypoint to a new one. Here both clusters
are private ones with the manifest's number of worker nodes; each has its own ports, folders and token, and
the first is killed with everything on it. Only the storage is left.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.campaign_checks import Judge
from cluster.head import PrivateHead, PrivateNode, start_head, start_node
from cluster.witness import Notes
from layercheck.cli import main as layercheck
from tests.e2e.runs import ROOT, SMALL, progress_step, summary
from tests.manifests import entrypoint_words, flag

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
STEPS, KILLED_AFTER = 40, 20


class Job:
    """The RayJob, with a storage of this test and a run that ends soon."""

    def __init__(self, folder: Path) -> None:
        text = (ROOT / "cluster/deploy/kuberay/train.yaml").read_text()
        self.manifest: dict[str, Any] = yaml.safe_load(text)
        words = entrypoint_words(self.manifest)
        storage, name = flag(words, "--storage"), flag(words, "--run-name")
        assert storage is not None
        assert name is not None
        self.run, self.notes, self.log = folder / "storage" / name, folder / "witness", folder / "job.log"
        settings = {**SMALL, "train.steps": STEPS, "checkpoint.settings.takeover_s": 5}
        words[words.index(storage)] = str(self.run.parent)
        words += [f"{key}={value}" for key, value in settings.items()] + [f"faults.witness={self.notes}"]
        self.entrypoint = words

    @property
    def nodes(self) -> tuple[int, list[int]]:
        """CPUs that the head offers, and each worker node."""
        spec = self.manifest["spec"]["rayClusterSpec"]
        (group,) = spec["workerGroupSpecs"]
        (container,) = group["template"]["spec"]["containers"]
        cpus = int(container["resources"]["limits"]["cpu"])
        return int(spec["headGroupSpec"]["rayStartParams"]["num-cpus"]), [cpus] * group["replicas"]

    @contextmanager
    def cluster(self) -> Iterator[tuple[PrivateHead, list[PrivateNode]]]:
        """A new cluster as the manifest asks for; the code lies where an image would have it."""
        head_cpus, workers = self.nodes
        with ExitStack() as stack:
            head = stack.enter_context(start_head(head_cpus, env={"PYTHONPATH": str(ROOT)}))
            yield head, [stack.enter_context(start_node(head, cpus)) for cpus in workers]

    def submit(self, head: PrivateHead, attempt: int) -> subprocess.Popen[bytes]:
        """As the submitter pod does: each retry has a job id of its own, and the log is followed."""
        environment = yaml.safe_load(self.manifest["spec"]["runtimeEnvYAML"])
        environment["env_vars"]["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.dashboard]
        command += ["--submission-id", f"layercheck-train-{attempt}"]
        command += ["--runtime-env-json", json.dumps(environment), "--", *self.entrypoint]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command,
                cwd="/",
                env=head.client_env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def reached(self, attempt: int) -> int:
        """Newest step that rank 0 of an attempt noted, 0 before the first."""
        lives = [life for life in Notes(self.notes).lives() if (life.attempt, life.rank) == (attempt, 0)]
        return max((life.steps[-1][0] for life in lives if life.steps), default=0)

    def wait_for_step(self, step: int, submitter: subprocess.Popen[bytes], limit_s: float = 180) -> None:
        deadline = time.monotonic() + limit_s
        while self.reached(1) < step:
            assert submitter.poll() is None, f"the job ended before step {step}: {self.words()}"
            assert time.monotonic() < deadline, f"no step {step} within {limit_s:g} s: {self.words()}"
            time.sleep(0.1)


def test_a_job_whose_cluster_is_gone_goes_on_at_the_next_step_on_another_cluster(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.cluster() as (first, nodes):
        submitter = job.submit(first, 1)
        job.wait_for_step(KILLED_AFTER, submitter)
        for node in (first, *nodes):
            node.kill()
        assert submitter.wait(60) != 0, "a submitter whose cluster is gone has failed: KubeRay retries"
        assert [node.members() for node in (first, *nodes)] == [[], [], []]
    trained, journaled = job.reached(1), progress_step(job.run, 1)
    committed = max(
        int(path.parent.name[5:13]) for path in job.run.glob("layercheck/events/*/commit.parquet")
    )
    assert KILLED_AFTER <= trained < STEPS, "killed in mid-run"
    with job.cluster() as (second, _):
        assert second.address != first.address
        assert second.dashboard != first.dashboard
        assert job.submit(second, 2).wait(240) == 0, job.words()
    (resumed,) = summary(job.run)["resumed"]
    assert resumed["t_fail_source"] in ("journal", "commit"), "nothing but the storage was left"
    assert resumed["t_fail"] == max(journaled, committed), "the last that storage knew"
    assert resumed["t_fail"] <= trained
    assert resumed["resume_step"] == resumed["t_fail"] + 1
    assert resumed["mode"] == "composite"
    found = summary(job.run)
    assert (found["status"], found["steps"], found["attempts"]) == ("completed", STEPS, 2)
    said = f"resume step {resumed['resume_step']}"
    assert said in job.log.read_text(), "the job's log says where it went on"
    judge = Judge(job.run / "layercheck", job.notes)
    judge.finish()
    assert judge.verdict.problems == []
    assert judge.verdict.compared > 0
    assert layercheck(["verify", str(job.run)]) == 0
