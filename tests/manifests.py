"""What a Kubernetes API server and KubeRay would say of a manifest: structure and rules, without either.

The keys are those of the ray.io/v1 CRDs (KubeRay 1.5); the rules are those that KubeRay's validation
enforces, and those without which a retry on a new cluster could not resume.
"""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_NAME = 47
JOB_KEYS = {
    "entrypoint", "runtimeEnvYAML", "rayClusterSpec", "clusterSelector", "submissionMode",
    "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "activeDeadlineSeconds",
    "preRunningDeadlineSeconds", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources",
    "submitterPodTemplate", "submitterConfig", "metadata", "suspend", "deletionStrategy", "jobId",
    "managedBy",
}  # fmt: skip
CLUSTER_KEYS = {
    "rayVersion", "headGroupSpec", "workerGroupSpecs", "authOptions", "enableInTreeAutoscaling",
    "autoscalerOptions", "gcsFaultToleranceOptions", "headServiceAnnotations", "suspend", "managedBy",
}  # fmt: skip
HEAD_KEYS = {
    "rayStartParams",
    "template",
    "enableIngress",
    "headService",
    "serviceType",
    "resources",
    "labels",
}
WORKER_KEYS = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "idleTimeoutSeconds",
    "priority", "numOfHosts", "labels", "resources", "scaleStrategy", "suspend",
}  # fmt: skip
MODES = {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Everything that is wrong with one document."""
    check = {"RayJob": _job, "RayCluster": _lone_cluster, "PersistentVolumeClaim": _claim}.get(
        manifest["kind"]
    )
    if check is None:
        return [f"unknown kind {manifest['kind']!r}"]
    return [*_name(manifest), *check(manifest)]


def entrypoint_words(manifest: dict[str, Any]) -> list[str]:
    """The command of a RayJob."""
    return shlex.split(manifest["spec"]["entrypoint"])


def flag(words: list[str], name: str) -> str | None:
    """The value behind `name`, None without it."""
    return words[words.index(name) + 1] if name in words else None


def _name(manifest: dict[str, Any]) -> Iterator[str]:
    name = manifest["metadata"].get("name", "")
    if not DNS_1035.fullmatch(name) or len(name) > MAX_NAME:
        yield f"name {name!r} is no DNS-1035 label of at most {MAX_NAME} characters"


def _unknown(what: str, given: dict[str, Any], known: set[str]) -> Iterator[str]:
    for key in sorted(given.keys() - known):
        yield f"{what} has no field {key!r}"


def _claim(manifest: dict[str, Any]) -> Iterator[str]:
    if manifest["apiVersion"] != "v1":
        yield f"apiVersion {manifest['apiVersion']!r}"
    if "ReadWriteMany" not in manifest["spec"]["accessModes"]:
        yield "pods of several nodes write: accessModes needs ReadWriteMany"
    if "storage" not in manifest["spec"]["resources"]["requests"]:
        yield "resources.requests.storage is missing"


def _lone_cluster(manifest: dict[str, Any]) -> Iterator[str]:
    yield from _api(manifest)
    yield from _cluster(manifest["spec"])


def _api(manifest: dict[str, Any]) -> Iterator[str]:
    if manifest["apiVersion"] != "ray.io/v1":
        yield f"apiVersion {manifest['apiVersion']!r}, not ray.io/v1"


# ---------------------------------------------------------------- RayJob


def _job(manifest: dict[str, Any]) -> Iterator[str]:
    spec = manifest["spec"]
    yield from _api(manifest)
    yield from _unknown("RayJob spec", spec, JOB_KEYS)
    if not spec.get("entrypoint"):
        yield "entrypoint is missing"
    if ("rayClusterSpec" in spec) == ("clusterSelector" in spec):
        yield "give exactly one of rayClusterSpec and clusterSelector"
    yield from _lifetime(spec)
    yield from _runtime_env(spec.get("runtimeEnvYAML", "{}"))
    if "rayClusterSpec" in spec:
        yield from _cluster(spec["rayClusterSpec"])
        yield from _resumes(manifest)


def _lifetime(spec: dict[str, Any]) -> Iterator[str]:
    mode, retries = spec.get("submissionMode", "K8sJobMode"), spec.get("backoffLimit", 0)
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    if mode not in MODES:
        yield f"submissionMode {mode!r}"
    if not isinstance(retries, int) or retries < 0:
        yield f"backoffLimit {retries!r}"
    if retries and "clusterSelector" in spec:
        yield "backoffLimit is refused with clusterSelector"
    if retries and mode == "InteractiveMode":
        yield "backoffLimit is refused in InteractiveMode"
    if spec.get("ttlSecondsAfterFinished", 0) and not shuts_down:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and not shuts_down:
        yield "suspend needs shutdownAfterJobFinishes: true"
    if shuts_down and "clusterSelector" in spec:
        yield "shutdownAfterJobFinishes is refused with clusterSelector"


def _runtime_env(text: str) -> Iterator[str]:
    """KubeRay looks at the YAML only; a wrong value is found when the job has long been queued."""
    if not isinstance(text, str):
        yield "runtimeEnvYAML is a string that holds YAML"
        return
    given = yaml.safe_load(text)
    for key, value in (given.get("env_vars") or {}).items():
        if not isinstance(value, str):
            yield f"runtimeEnvYAML: env_vars.{key} must be a string"


def _resumes(manifest: dict[str, Any]) -> Iterator[str]:
    """A retry comes on a new cluster: what it resumes from must be fixed and lie outside."""
    spec, words = manifest["spec"], entrypoint_words(manifest)
    if words[:3] != ["python", "-m", "app"]:
        return
    storage = flag(words, "--storage")
    if flag(words, "--run-name") is None:
        yield "without --run-name nothing says which run a retry continues"
    if storage is None or not ("://" in storage or storage.startswith("/")):
        yield f"--storage {storage} is no place that every pod sees"
    elif "://" not in storage:
        for pod in _pods(spec["rayClusterSpec"]):
            if not _is_claimed(pod, storage):
                yield f"--storage {storage} is on no persistent volume in every pod"
    if spec.get("backoffLimit", 0) and "activeDeadlineSeconds" in spec:
        yield "a run that exceeds activeDeadlineSeconds is not retried"


def _is_claimed(pod: dict[str, Any], path: str) -> bool:
    claims = {volume["name"] for volume in pod.get("volumes", ()) if "persistentVolumeClaim" in volume}
    mounts = [mount for container in pod["containers"] for mount in container.get("volumeMounts", ())]
    return any(
        mount["name"] in claims and f"{path}/".startswith(f"{mount['mountPath'].rstrip('/')}/")
        for mount in mounts
    )


# ---------------------------------------------------------------- RayCluster


def _pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def _cluster(spec: dict[str, Any]) -> Iterator[str]:
    yield from _unknown("RayCluster spec", spec, CLUSTER_KEYS)
    yield from _unknown("headGroupSpec", spec["headGroupSpec"], HEAD_KEYS)
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode must be token"
    if "autoscalerOptions" in spec and not spec.get("enableInTreeAutoscaling"):
        yield "autoscalerOptions need enableInTreeAutoscaling: true"
    for group in spec["workerGroupSpecs"]:
        yield from _group(group)
    for pod in _pods(spec):
        yield from _pod(pod, spec["rayVersion"])
    if spec.get("autoscalerOptions", {}).get("version") == "v2":
        yield from (
            "autoscaler v2 needs restartPolicy: Never"
            for pod in _pods(spec)
            if pod.get("restartPolicy") != "Never"
        )


def _group(group: dict[str, Any]) -> Iterator[str]:
    name = group.get("groupName", "?")
    yield from _unknown(f"group {name}", group, WORKER_KEYS)
    if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
        yield f"group {name}: minReplicas <= replicas <= maxReplicas does not hold"


def _pod(pod: dict[str, Any], version: str) -> Iterator[str]:
    known = {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        name = container["name"]
        if "limits" not in container.get("resources", {}):
            yield f"container {name}: Ray takes its CPUs and memory from resources.limits"
        if container["image"].startswith("rayproject/") and f":{version}" not in container["image"]:
            yield f"container {name}: image {container['image']} is not of rayVersion {version}"
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in known:
                yield f"container {name}: volume {mount['name']!r} is not declared"
        yield from _hook(container, pod.get("terminationGracePeriodSeconds", 30))


def _hook(container: dict[str, Any], grace_s: int) -> Iterator[str]:
    """Kubernetes kills the hook together with the container."""
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    if hook and float(hook[hook.index("--deadline-s") + 1]) >= grace_s:
        yield f"container {container['name']}: its hook outlasts terminationGracePeriodSeconds {grace_s}"
