"""The wheel holds all that the code needs and nothing else; a package imports what its extra brings."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import layercheck
from tests.conftest import ROOT
from tests.test_architecture import PACKAGES, imports, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "layercheck": (),
    "layercheck.integrations.hf": ("hf",),
    "cluster": ("ray",),
    "app": ("app",),
    "app.adapters": ("app", "lora"),
    "app.curves": ("app", "wandb"),
    "simulations": ("sim", "ray"),
}
"""Module, or all below it -> the extras that its imports may come from, besides the core."""
IMPORT_NAMES = {"pyyaml": "yaml", "tensorboardx": "tensorboardX"}
"""Where the name of a distribution is not that of its module."""
RUNS_ONLY_WITH = {"cluster.witness": {"torch"}, "app.section": {"pydantic_core"}}
"""Imports of a part that another package brings along: the witness is called by the app; pydantic's core."""
NOT_CORE = {
    "ray",
    "transformers",
    "accelerate",
    "datasets",
    "matplotlib",
    "tokenizers",
    "safetensors",
    "yaml",
}


# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders beside its sources."""
    tmp = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, tmp / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp / "source" / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", tmp / "out", tmp / "source")
    (built,) = (tmp / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--target", folder, wheel)
    return folder


def pip(command: str, *args: str | Path) -> None:
    """Without dependencies and without a network."""
    flags = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    run = [sys.executable, "-m", "pip", command, *flags, *map(str, args)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def foreign(installed: Path, *command: str) -> str:
    """What a command prints in a folder of somebody else's, who has the core dependencies and no others."""
    (installed.parent / "foreign").mkdir(exist_ok=True)
    hidden = f"import sys; sys.modules.update(dict.fromkeys({sorted(NOT_CORE)!r}))"
    (installed / "sitecustomize.py").write_text(hidden)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=installed.parent / "foreign",
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_packages_and_no_test(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    names = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    wanted = {name for name in names if not name.startswith("simulations/results/")}
    assert held == wanted
    assert {Path(name).suffix for name in held} >= {
        ".yaml",
        ".css",
        ".js",
        ".json",
        ".sh",
        ".sbatch",
        ".typed",
    }


def test_the_wheel_tells_its_version_its_licence_and_its_command(wheel: Path) -> None:
    assert wheel.name == f"layercheck-{layercheck.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"layercheck-{layercheck.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        assert "layercheck = layercheck.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Classifier: Typing :: Typed" in metadata


def test_a_foreign_project_has_the_library_and_its_command_with_the_core_alone(installed: Path) -> None:
    code = "import layercheck, layercheck.session; print(layercheck.__file__, layercheck.attach.__module__)"
    assert foreign(installed, "-c", code).split() == [
        str(installed / "layercheck" / "__init__.py"),
        "layercheck.session",
    ]
    command = str(installed / "bin" / "layercheck")
    assert foreign(installed, command, "--version") == f"layercheck {layercheck.__version__}\n"
    said = foreign(installed, command, "--help")
    assert all(name in said for name in ("status", "plan", "verify", "gc", "report", "export"))


@pytest.mark.slow
def test_a_checker_of_types_knows_the_library_in_a_foreign_project(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        'import layercheck\nsession = layercheck.attach(None, storage="/s", run="r")\n'
        "reveal_type(session)\nreveal_type(session.resume())\nsession.after_step('one', {})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent",
         "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), str(script)],
        cwd=tmp_path,
        env={"MYPYPATH": str(installed), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert 'Revealed type is "layercheck.session.Session"' in done.stdout, done.stdout + done.stderr
    assert 'Revealed type is "layercheck.receipt.ResumePoint"' in done.stdout, done.stdout
    assert 'has incompatible type "str"; expected "int"' in done.stdout, done.stdout


# ---------------------------------------------------------------- what each part needs


def names_of(requirements: Iterable[str]) -> set[str]:
    """Modules that requirements bring; an extra of our own stands for what is in it."""
    found: set[str] = set()
    for need in map(Requirement, requirements):
        if need.name == PROJECT["name"]:
            for extra in need.extras:
                found |= names_of(PROJECT["optional-dependencies"][extra])
        else:
            found.add(IMPORT_NAMES.get(need.name.lower(), need.name.lower()))
    return found


def allowed(module: str) -> set[str]:
    key = max((name for name in EXTRAS if f"{module}.".startswith(f"{name}.")), key=len)
    needs = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in EXTRAS[key])]
    return set().union(*map(names_of, needs)) | RUNS_ONLY_WITH.get(module, set())


def outside(module: str) -> set[str]:
    """Everything that a module imports, at load or later, that is neither ours nor Python's own."""
    names = {item.module.split(".")[0] for item in imports(module)}
    return names - sys.stdlib_module_names - set(PACKAGES)


def test_no_part_imports_what_its_extra_does_not_bring() -> None:
    undeclared = {module: outside(module) - allowed(module) for module in sources()}
    assert {module: names for module, names in undeclared.items() if names} == {}


def test_every_dependency_is_imported_somewhere() -> None:
    imported = set().union(*(outside(module) for module in sources()))
    told = [*PROJECT["dependencies"], *(t for name in ("hf", "ray", "app", "sim") for t in extra(name))]
    # `accelerate` is what the Hugging Face Trainer needs for DeepSpeed; we never name it.
    assert names_of(told) - imported == {"accelerate"}
    assert NOT_CORE & names_of(PROJECT["dependencies"]) == set()


def extra(name: str) -> list[str]:
    found: list[str] = PROJECT["optional-dependencies"][name]
    return found


# ---------------------------------------------------------------- one version


def test_the_version_is_semantic_and_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9a-z.]+)?", layercheck.__version__)
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT


def test_the_images_that_the_documents_name_are_of_this_version() -> None:
    files = [*(ROOT / "cluster" / "deploy").rglob("*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = {path: path.read_text() for path in files if path.is_file()}
    found = {
        (path.name, tag)
        for path, text in texts.items()
        for tag in re.findall(r"\blayercheck:(\d[\w.]*)", text)
    }
    assert len(found) >= 3
    assert {item for item in found if item[1] != layercheck.__version__} == set()


def test_the_changelog_keeps_its_form_and_is_not_behind_the_code() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}", head) for head in heads[1:]]
    assert None not in releases, heads
    versions = [Version(found[1]) for found in releases if found]
    assert versions == sorted(versions, reverse=True)
    assert all(version <= Version(layercheck.__version__) for version in versions)
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
