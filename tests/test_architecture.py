"""The shape of the code: directions, pure files, sizes, and the tools that guard style and types."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "docs" / "reference" / "tree.md"
PACKAGES = ("layercheck", "cluster", "app", "simulations")
MAY_IMPORT = {
    "layercheck": {"layercheck"},
    "cluster": {"cluster", "layercheck"},
    "app": {"app", "cluster", "layercheck"},
    "simulations": {"simulations", "layercheck", "app"},
}
PURE = {
    "app.baselines.checkfreq_tuning",
    "app.memory",
    "app.baselines.lowdiff.batch_file",
    "app.baselines.lowdiff.tuning",
    "app.baselines.gemini.decision",
    "app.baselines.gemini.placement",
    "app.baselines.gemini.records",
    "app.measure.fidelity.spec",
    "app.measure.memory.spec",
    "app.measure.residuals.spec",
    "layercheck.config",
    "layercheck.decision",
    "layercheck.drift_report",
    "layercheck.end_signals",
    "layercheck.errors",
    "layercheck.groups",
    "layercheck.layers",
    "layercheck.lost",
    "layercheck.manifest",
    "layercheck.receipt",
    "layercheck.redact",
    "layercheck.step_report",
    "layercheck.coordination.collect",
    "layercheck.coordination.deaths",
    "layercheck.coordination.facts",
    "layercheck.coordination.failures",
    "layercheck.coordination.in_memory",
    "layercheck.coordination.lineage",
    "layercheck.coordination.lost",
    "layercheck.coordination.plan",
    "layercheck.coordination.protocol",
    "layercheck.coordination.residuals",
    "layercheck.coordination.restarts",
    "layercheck.coordination.rows",
    "layercheck.coordination.scrub_order",
    "layercheck.coordination.status",
    "layercheck.memory.held",
    "layercheck.persistence.bases",
    "layercheck.persistence.quantise",
    "layercheck.persistence.recode",
    "layercheck.recovery.residual",
    "layercheck.recovery.scatter",
    "layercheck.tracking.budget",
    "layercheck.tracking.calibrate",
    "layercheck.tracking.ledger",
    "layercheck.tracking.memory",
    "layercheck.tracking.policy",
    "layercheck.tracking.reasons",
    "layercheck.tracking.sealed",
    "layercheck.tracking.preemption",
    "layercheck.tracking.still",
    "layercheck.tracking.unsaved",
    "layercheck.tracking.versions",
    "layercheck.tracking.warmup",
    "simulations.charges",
    "simulations.comparison.arms",
    "simulations.comparison.as_costs",
    "simulations.comparison.block",
    "simulations.comparison.figures",
    "simulations.engines.booked",
    "simulations.engines.reference",
    "simulations.engines.segments",
    "simulations.failures",
    "simulations.fidelity.checks",
    "simulations.fidelity.experiments",
    "simulations.fidelity.figures",
    "simulations.fidelity.result",
    "simulations.memory.arms",
    "simulations.memory.figures",
    "simulations.memory.peers",
    "simulations.memory.result",
    "simulations.memory.tuned",
    "simulations.methods",
    "simulations.model",
    "simulations.residuals.arms",
    "simulations.residuals.figures",
    "simulations.residuals.result",
}
HEAVY = {"torch", "ray", "deepspeed", "transformers"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80


class Import(NamedTuple):
    """One imported name, as written; `at_load` is false inside functions and under TYPE_CHECKING."""

    module: str
    at_load: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of the four code folders."""
    return {module_name(path): path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_in(node: ast.AST, module: str, is_package: bool, at_load: bool = True) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(name, at_load) for name in from_names(child, module, is_package))
        else:
            yield from imports_in(child, module, is_package, at_load and not later and not types_only)


def from_names(node: ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    """`from a import b` may import the module a.b, and a in any case."""
    base = node.module or ""
    if node.level:
        parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
        base = ".".join([*parents, base] if base else parents)
    names = [f"{base}.{alias.name}" for alias in node.names]
    yield from [name for name in names if name in sources()] or [base]


@cache
def imports(module: str) -> tuple[Import, ...]:
    path = sources()[module]
    return tuple(imports_in(tree(path), module, path.name == "__init__.py"))


@cache
def loaded_by(module: str) -> frozenset[str]:
    """Modules of ours that importing `module` runs directly: its imports and the packages around them."""
    names = {item.module for item in imports(module) if item.at_load} | {module}
    parents = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    return frozenset(name for name in names | parents if name in sources() and name != module)


def all_loaded(module: str) -> set[str]:
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(loaded_by(name))
    return seen


def outside(module: str, at_load_only: bool) -> set[str]:
    """Top-level names of everything that a module imports."""
    return {item.module.split(".")[0] for item in imports(module) if item.at_load or not at_load_only}


def heavy_at_load(module: str) -> list[str]:
    return [
        f"{name} imports {heavy}"
        for name in sorted(all_loaded(module))
        for heavy in sorted(outside(name, at_load_only=True) & HEAVY)
    ]


# ------------------------------------------------------------------------------------------------- directions


def test_dependence_goes_one_way():
    wrong = [
        f"{module} imports {item.module}"
        for module in sources()
        for item in imports(module)
        if item.module.split(".")[0] in PACKAGES
        and item.module.split(".")[0] not in MAY_IMPORT[module.split(".")[0]]
    ]
    assert wrong == []


def test_no_code_imports_the_tests():
    assert [module for module in sources() if "tests" in outside(module, at_load_only=False)] == []


def test_no_module_imports_itself_through_others():
    graph = {
        module: {item.module for item in imports(module) if item.at_load and item.module in sources()}
        for module in sources()
    }
    graph = {module: names - {module} for module, names in graph.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_deepspeed_is_known_to_one_file_and_the_app():
    knows = {module for module in sources() if "deepspeed" in outside(module, at_load_only=False)}
    assert {module for module in knows if not module.startswith("app")} <= {"layercheck.zero3"}


def test_the_library_does_not_know_ray():
    library = [module for module in sources() if module.startswith("layercheck")]
    assert [module for module in library if "ray" in outside(module, at_load_only=False)] == []


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_file_loads_no_heavy_package_even_through_others(module: str):
    assert module in sources(), f"{module} is gone: take it off the list, or bring it back"
    assert heavy_at_load(module) == []


def test_files_marked_pure_are_the_pure_files():
    marked = {
        name for name, path in sources().items() if (ast.get_docstring(tree(path)) or "").startswith("[pure]")
    }
    assert marked <= PURE


def test_the_simulation_uses_only_files_of_the_library_that_load_no_torch():
    wrong = [
        f"{module}: {reason}"
        for module in sources()
        if module.startswith("simulations")
        for name in loaded_by(module)
        if name.startswith("layercheck")
        for reason in heavy_at_load(name)
    ]
    assert wrong == []


def test_the_policy_runs_without_any_heavy_package_in_the_process():
    """What the parsed imports promise, seen in a real interpreter."""
    names = sorted(PURE & sources().keys())
    code = f"import sys, {', '.join(names)}; print(sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# ------------------------------------------------------------------------------------------------ size, ASCII


def python_files() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "tests")]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_no_module_is_longer_than_400_lines():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {str(path): n for path, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_no_function_is_longer_than_80_lines():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_code_and_comments_are_ascii():
    scripts = [path for name in (*PACKAGES, "tests") for path in (ROOT / name).rglob("*.sh")]
    settings = [path for name in PACKAGES for path in (ROOT / name).rglob("*.yaml")]
    files = [*python_files(), *scripts, *settings, ROOT / "pyproject.toml"]
    assert [str(path) for path in files if not path.read_bytes().isascii()] == []


# ------------------------------------------------------------------------------------------------------ tools


def check(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    check("ruff", "check", ".")


def test_the_code_is_formatted():
    check("ruff", "format", "--check", ".")


def test_the_types_hold():
    check("mypy")


def test_the_tree_names_every_file() -> None:
    tree = TREE.read_text()
    packages = ("layercheck", "cluster", "app", "simulations")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    missing = [str(path.relative_to(ROOT)) for path in files if not re.search(rf"\b{path.name}\b", tree)]
    assert [name for name in missing if not name.endswith("__init__.py")] == []
