"""The files that start Ray elsewhere: manifests that would be accepted, commands that programs understand."""

import copy
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from app.config import load_config
from cluster.leave import main as leave_main
from cluster.submit import STOP_WAIT_S, job_environment
from layercheck.errors import ConfigError
from tests.manifests import entrypoint_words, flag, problems

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "cluster" / "deploy"
KUBERAY = sorted((DEPLOY / "kuberay").glob("*.yaml"))
Change = Callable[[dict[str, Any]], Any]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def job(name: str) -> dict[str, Any]:
    (only,) = documents(DEPLOY / "kuberay" / f"{name}.yaml")
    return only


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


# ---------------------------------------------------------------- KubeRay


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.stem)
def test_a_manifest_would_be_accepted_and_its_retries_resume(path: Path) -> None:
    assert {text for document in documents(path) for text in problems(document)} == set()


def _emptied(manifest: dict[str, Any]) -> None:
    for pod in pods(manifest):
        pod["volumes"][0] = {"name": "runs", "emptyDir": {}}


SPOILED: dict[str, Change] = {
    "DNS-1035": lambda m: m["metadata"].update(name="x" * 48),
    "no field 'backofLimit'": lambda m: m["spec"].update(backofLimit=3),
    "refused with clusterSelector": lambda m: (
        m["spec"].update(clusterSelector={"ray.io/cluster": "x"}),
        m["spec"].pop("rayClusterSpec"),
    ),
    "exactly one of": lambda m: m["spec"].update(clusterSelector={"ray.io/cluster": "x"}),
    "refused in InteractiveMode": lambda m: m["spec"].update(submissionMode="InteractiveMode"),
    "submissionMode 'Job'": lambda m: m["spec"].update(submissionMode="Job"),
    "ttlSecondsAfterFinished needs": lambda m: m["spec"].update(shutdownAfterJobFinishes=False),
    "not retried": lambda m: m["spec"].update(activeDeadlineSeconds=60),
    "must be a string": lambda m: m["spec"].update(runtimeEnvYAML="env_vars: {A: 1}"),
    "is a string that holds YAML": lambda m: m["spec"].update(runtimeEnvYAML={"env_vars": {}}),
    "which run a retry continues": lambda m: m["spec"].update(entrypoint="python -m app --storage /mnt/runs"),
    "no place that every pod sees": lambda m: m["spec"].update(
        entrypoint="python -m app --run-name x --storage runs"
    ),
    "on no persistent volume": _emptied,
    "authOptions.mode": lambda m: m["spec"]["rayClusterSpec"].pop("authOptions"),
    "enableInTreeAutoscaling": lambda m: m["spec"]["rayClusterSpec"].update(autoscalerOptions={}),
    "restartPolicy": lambda m: m["spec"]["rayClusterSpec"].update(
        enableInTreeAutoscaling=True, autoscalerOptions={"version": "v2"}
    ),
    "minReplicas <= replicas": lambda m: m["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(
        replicas=9
    ),
    "not of rayVersion": lambda m: pods(m)[1]["containers"][0].update(image="rayproject/ray:2.59.0"),
    "is not declared": lambda m: pods(m)[1]["volumes"].pop(),
    "resources.limits": lambda m: pods(m)[0]["containers"][0]["resources"].pop("limits"),
    "outlasts": lambda m: pods(m)[0].update(terminationGracePeriodSeconds=30),
    "not ray.io/v1": lambda m: m.update(apiVersion="ray.io/v1alpha1"),
}


@pytest.mark.parametrize("text", sorted(SPOILED))
def test_each_rule_finds_the_manifest_that_breaks_it(text: str) -> None:
    manifest = copy.deepcopy(job("train"))
    SPOILED[text](manifest)
    assert any(text in problem for problem in problems(manifest))


def test_the_entrypoint_of_the_training_is_a_configuration_that_holds() -> None:
    words = entrypoint_words(job("train"))
    settings = words[words.index("--set") + 1 :]
    config = load_config(flag(words, "--config") or "", settings)
    group = job("train")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert config.cluster.workers <= group["maxReplicas"] * 2  # CPUs of a pod
    hook = pods(job("train"))[1]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert config.checkpoint.settings.preemption_grace_s < float(hook[-1])


def test_the_simulation_reads_the_run_that_the_training_writes() -> None:
    words = entrypoint_words(job("train"))
    run = f"{flag(words, '--storage')}/{flag(words, '--run-name')}"
    assert flag(entrypoint_words(job("ettr")), "--costs") == run


def test_the_hook_is_a_command_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("cluster.leave.leave", lambda deadline_s, *_: seen.append(deadline_s) or True)
    for name in ("train", "cluster"):
        for pod in pods(job(name)):
            command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert command[:3] == ["python", "-m", "cluster.leave"]
            assert leave_main(command[3:]) == 0
    assert seen == [120.0] * 4


# ---------------------------------------------------------------- ray up


def test_the_launcher_file_is_what_rays_schema_asks_for() -> None:
    given = yaml.safe_load((DEPLOY / "ray-up.yaml").read_text())
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(given, json.loads(schema.read_text()))
    types = given["available_node_types"]
    assert given["head_node_type"] in types
    assert sum(kind.get("min_workers", 0) for kind in types.values()) <= given["max_workers"]
    assert all({"resources", "node_config"} <= kind.keys() for kind in types.values())
    starts = [*given["head_start_ray_commands"], *given["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in line for line in starts if "ray start" in line)


# ---------------------------------------------------------------- pinned needs


def pins() -> dict[str, Version]:
    lines = (DEPLOY / "requirements.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for need in found:
        assert [spec.operator for spec in need.specifier] == ["=="], f"{need} is not pinned"
    return {need.name: Version(next(iter(need.specifier)).version) for need in found}


def test_the_pins_are_all_that_a_job_needs_within_the_ranges_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [
        *project["dependencies"],
        *(text for name in ("hf", "ray", "app", "sim") for text in extras[name]),
    ]
    needs = [Requirement(text) for text in texts]
    # Ray, and what the job's client needs, is the cluster's own.
    needs = [need for need in needs if need.name not in ("layercheck", "ray", "aiohttp")]
    found = pins()
    assert {need.name.lower() for need in needs} == found.keys()
    assert [str(need) for need in needs if found[need.name.lower()] not in need.specifier] == []


def test_every_file_names_the_same_ray_and_the_project_allows_it() -> None:
    text = "\n".join(path.read_text() for path in [*KUBERAY, DEPLOY / "ray-up.yaml", DEPLOY / "Dockerfile"])
    versions = set(re.findall(r"(?:rayVersion: \"|rayproject/ray:)([\d.]+\d)", text))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (need,) = (need for item in extras["ray"] if (need := Requirement(item)).name == "ray")
    assert versions == {"2.60.0"}
    assert Version("2.60.0") in need.specifier


def test_a_job_of_stock_images_installs_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = job_environment(Path("cluster/deploy/runtime_env.yaml"), {"A": "b"})
    parsed = ray.runtime_env.RuntimeEnv(**{key: made[key] for key in ("pip", "env_vars", "config")})
    packages = [line for line in parsed["pip"]["packages"] if "==" in line]
    assert {Requirement(line).name for line in packages} == pins().keys()
    assert parsed["env_vars"] == {"A": "b", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    assert made["working_dir"] == str(ROOT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("working_dir: .", "working_dir"),
        ("- pip", "must hold keys"),
        ("a: [", "--runtime-env"),
    ],
)
def test_a_wrong_environment_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        job_environment(path, {})


def test_commands_in_the_comments_name_files_that_exist() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    named = {word for path in files for word in re.findall(r"cluster/deploy/[\w./-]+", path.read_text())}
    assert [name for name in sorted(named) if not (ROOT / name.rstrip(".")).exists()] == []
    assert shlex.split(" ".join(sorted(named)))
