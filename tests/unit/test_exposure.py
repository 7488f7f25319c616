"""Who may reach a run: what listens and where, what may be started, what is told to whom."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from cluster.metrics import COUNTERS, GAUGES, tag_keys
from tests.conftest import ROOT
from tests.test_architecture import sources, tree

TEXTS = {".md", ".py", ".sbatch", ".sh", ".yaml", ".yml", ".toml", ".json"}
STARTS_PROGRAMS = {
    "cluster.head": "Ray nodes, by its own interpreter",
    "cluster.leave": "Ray's own command that drains a node",
    "cluster.local": "the command that its user gave",
    "cluster.locks": "the compiler of DeepSpeed's op",
    "cluster.private_run": "the application",
}
"""The only modules that start processes, and what."""


def files() -> Iterator[Path]:
    """Everything that a user may run or copy from."""
    for name in ("layercheck", "cluster", "app", "simulations", "docs"):
        yield from (path for path in (ROOT / name).rglob("*") if path.suffix in TEXTS)
    yield from (ROOT / "README.md", *(ROOT / ".github").rglob("*.yml"))


@cache
def calls() -> tuple[tuple[str, str, ast.Call], ...]:
    """(module, what is called, the call) of all code."""
    return tuple(
        (module, ast.unparse(node.func), node)
        for module, path in sources().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    )


# ---------------------------------------------------------------- the dashboard


def dashboard_hosts(text: str) -> list[str]:
    return re.findall(r"--dashboard-host[=\s\",]+([\w.:]+)", text)


def test_the_dashboard_is_asked_for_on_loopback_alone() -> None:
    found = {path.name: dashboard_hosts(path.read_text()) for path in files()}
    hosts = {name: where for name, where in found.items() if where}
    assert hosts.keys() >= {"head.py", "train.sbatch", "ray-up.yaml"}
    assert {host for where in hosts.values() for host in where} == {"127.0.0.1"}


@pytest.mark.parametrize(
    "text", ["--dashboard-host=0.0.0.0", "--dashboard-host 0.0.0.0", '"--dashboard-host", "0.0.0.0"']
)
def test_another_host_is_seen(text: str) -> None:
    assert dashboard_hosts(text) == ["0.0.0.0"]


def head_starts(text: str) -> list[str]:
    """Commands that start a head by `ray start`, joined over continued lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if re.search(r"\bray (start|_node)?\b.*--head\b|ray_node.*--head\b", line)]


def test_every_head_that_a_file_starts_says_where_its_dashboard_listens() -> None:
    deploy = ROOT / "cluster" / "deploy"
    starts = [line for path in deploy.rglob("*") if path.is_file() for line in head_starts(path.read_text())]
    starts = [line for line in starts if not line.lstrip().startswith("#")]
    assert len(starts) >= 2
    assert [line for line in starts if "--dashboard-host=127.0.0.1" not in line] == []


# ---------------------------------------------------------------- the token


def auth_modes(text: str) -> list[str]:
    return re.findall(r"RAY_AUTH_MODE[\"']?\s*[:=]\s*[\"']?(\w+)", text)


def test_nothing_turns_the_token_off() -> None:
    found = {path.name: auth_modes(path.read_text()) for path in files()}
    assert {mode for modes in found.values() for mode in modes} == {"token"}
    assert {name for name, modes in found.items() if modes} >= {"head.py", "train.sbatch", "ray-up.yaml"}


def test_every_cluster_of_kuberay_asks_for_a_token() -> None:
    manifests = (ROOT / "cluster" / "deploy" / "kuberay").glob("*.yaml")
    clusters = [
        document["spec"].get("rayClusterSpec", document["spec"])
        for path in manifests
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] in ("RayJob", "RayCluster")
    ]
    assert len(clusters) == 3
    assert [cluster["authOptions"] for cluster in clusters] == [{"mode": "token"}] * 3


def test_no_file_holds_a_token_or_a_key() -> None:
    looks = re.compile(r"\b(?:[0-9a-f]{64}|AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|ghp_\w{30,})\b")
    held = {str(path.relative_to(ROOT)): looks.findall(path.read_text()) for path in files()}
    assert {path: found for path, found in held.items() if found} == {}


def test_metrics_are_told_of_a_run_by_its_name_alone() -> None:
    tags = {tag for key in (*GAUGES, *COUNTERS) for tag in tag_keys(key)}
    assert tags == {"run", "phase"}


# ---------------------------------------------------------------- what may be started


def test_only_the_cluster_s_own_modules_start_programs() -> None:
    starters = re.compile(r"^(subprocess|pty)\.\w+$|^os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*)$")
    assert {module for module, called, _ in calls() if starters.match(called)} == STARTS_PROGRAMS.keys()


def test_no_command_line_goes_through_a_shell() -> None:
    shells = [
        f"{module}:{call.lineno}"
        for module, _, call in calls()
        for keyword in call.keywords
        if keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
    ]
    assert shells == []


def test_no_module_is_imported_by_a_name_that_was_read() -> None:
    imports = {"import_module", "importlib.import_module", "__import__", "runpy.run_path", "runpy.run_module"}
    found = {
        module
        for module, called, call in calls()
        if called in imports and not (call.args and isinstance(call.args[0], ast.Constant))
    }
    assert found == {"layercheck"}, "its lazy names, from a table in the same file"


def test_code_of_a_model_folder_is_never_trusted() -> None:
    named = [str(path) for path in files() if "trust_remote_code" in path.read_text()]
    assert named == []
