"""The tree as a stranger meets it: what its page names exists, and nothing lies about that nobody uses."""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.test_architecture import PACKAGES, PURE, ROOT, TREE, python_files, sources, tree

KEPT_FOR_TESTS = {
    "layercheck.integrations.hf": {"LayerCheckTrainerMixin"},  # a user's class inherits from it
    "simulations.failures": {"mtbf_of_counts"},
    "simulations.methods": {"simple"},
    "simulations.model": {"small_loss_ettr"},  # the limit that the engines are held to
}
"""Top-level names that no code of ours uses, and are not dead."""
BY_RULE = {"main"}
"""Names that somebody else looks up: entry points."""


# ---------------------------------------------------------------- the page of the tree


def test_every_name_in_the_tree_exists() -> None:
    """The other direction is in test_architecture: a file that was renamed leaves no old name behind."""
    named = set(
        re.findall(r"(?<![\w/*.-])([\w-]+\.(?:py|sh|yaml|json|css|js|txt|sbatch))\b", TREE.read_text())
    )
    exist = {
        path.name for path in ROOT.rglob("*.*") if ".venv" not in path.parts and "runs" not in path.parts
    }
    written = {"run.json", "summary.json", "costs.json", "saving.json", "comparison.json"}
    """What a run or a measurement writes."""
    assert named - exist - written == set()


def test_every_helper_of_the_tests_is_in_the_tree() -> None:
    helpers = [path for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")]
    missing = [path.name for path in helpers if not re.search(rf"\b{path.name}\b", TREE.read_text())]
    assert [name for name in missing if name != "__init__.py"] == []


def test_files_that_the_tree_calls_pure_are_the_pure_files() -> None:
    """Of the lines that begin with one name: `plan.py  [pure] the recovery plan`."""
    names = {name.rpartition(".")[2] for name in PURE}
    lines = re.findall(r"^\s*(\w+)\.py\s+\[pure\]", TREE.read_text(), re.MULTILINE)
    assert len(lines) > 20
    assert [name for name in lines if name not in names] == []


# ---------------------------------------------------------------- nothing left over


@cache
def used() -> Counter[str]:
    """Names that the code of the packages mentions, definitions aside, and those that documents call."""
    found: Counter[str] = Counter()
    for path in sources().values():
        found.update(mentions(tree(path)))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found.update(re.findall(r"`(?:\w+\.)*(\w+)(?:\(.*?\))?`", "\n".join(page.read_text() for page in pages)))
    return found


def mentions(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier():
            yield child.value  # `getattr`, lazy names, annotations as text


def defined(module: ast.Module) -> Iterator[str]:
    """Top-level functions, classes and constants."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def leftovers(module: str, body: ast.Module) -> set[str]:
    names = {name for name in defined(body) if not name.startswith("__")}
    return {name for name in names if not used()[name]} - BY_RULE - KEPT_FOR_TESTS.get(module, set())


def test_nothing_at_the_top_of_a_module_is_dead() -> None:
    dead = {module: leftovers(module, tree(path)) for module, path in sources().items()}
    assert {module: names for module, names in dead.items() if names} == {}


def test_a_name_that_nobody_uses_is_found() -> None:
    body = ast.parse("LEFT_OVER_NAME = 1\ndef nobody_calls_this(): ...\nclass NobodyMakesThis: ...\n")
    assert leftovers("x", body) == {"LEFT_OVER_NAME", "nobody_calls_this", "NobodyMakesThis"}


def test_what_is_kept_for_tests_alone_is_still_there_and_still_used_by_none() -> None:
    for module, names in KEPT_FOR_TESTS.items():
        assert names <= set(defined(tree(sources()[module])))
        assert {name for name in names if used()[name] and module.startswith("simulations")} == set()


def test_no_note_to_ourselves_is_left() -> None:
    notes = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    texts = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".sh")]
    assert [str(path) for path in texts if notes.search(path.read_text())] == []


# ---------------------------------------------------------------- errors and sizes


def swallowed(body: ast.AST) -> Iterator[int]:
    """Lines of handlers that catch everything and neither raise, nor keep it, nor end the process."""
    for node in ast.walk(body):
        if isinstance(node, ast.ExceptHandler) and catches_all(node):
            raises = any(isinstance(child, ast.Raise) for child in ast.walk(node))
            raises |= "_exit" in mentions(node)
            keeps = node.name is not None and node.name in mentions(ast.Module(node.body, []))
            if not raises and not keeps:
                yield node.lineno


def catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def test_what_catches_everything_raises_it_again_or_keeps_it() -> None:
    hidden = {module: list(swallowed(tree(path))) for module, path in sources().items()}
    assert {module: lines for module, lines in hidden.items() if lines} == {}
    lines = "try:\n    f()\nexcept Exception:\n    log()\nexcept BaseException as e:\n    pass\n"
    assert list(swallowed(ast.parse(lines))) == [3, 5]


def test_most_functions_and_files_are_small() -> None:
    functions = [
        node.end_lineno - node.lineno + 1
        for path in sources().values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert statistics.median(functions) <= 15
    assert statistics.quantiles(functions, n=10)[-1] <= 40, "nine in ten"
    files = [len(path.read_text().splitlines()) for path in python_files()]
    assert statistics.median(files) <= 150


def test_every_folder_of_code_says_what_it_is_for() -> None:
    packages: list[Path] = [path for path in sources().values() if path.name == "__init__.py"]
    assert [str(path) for path in packages if not ast.get_docstring(tree(path))] == []
