"""What the documents say is what the programs understand: commands, settings, links, generated pages."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from app.config import Config
from layercheck.config import parse_config
from layercheck.errors import ConfigError
from tests.commands import PROGRAMS, WrongCommandError, check_line, parser_of
from tests.documents import ROOT, blocks, command_lines, documents, links
from tests.reference import FOLDER, config_page, field_texts, pages, sections

TOP = ("checkpoint", "cluster", "train", "data", "model", "run")
LINES = sorted({(str(path.relative_to(ROOT)), line) for path in documents() for line in command_lines(path)})


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_is_one_that_its_program_understands(page: str, line: str) -> None:
    check_line(line)


def test_there_are_commands_of_every_program_that_a_person_starts() -> None:
    text = "\n".join(line for _, line in LINES)
    hidden = {"cluster.wait", "cluster.leave"}  # called by the scripts of cluster/deploy
    assert [name for name in PROGRAMS if name not in hidden and name not in text] == []


@pytest.mark.parametrize(
    "line",
    [
        "layercheck status",
        "layercheck plan runs/x --mode composit",
        "python -m app --config tiny --sett a=b",
        "python -m app --config tiny --set checkpoint.settings.s_mx=3",
        "python -m cluster.submit train --config nosuch",
        "python -m cluster.submit ettr --costs paper",
        "python -m simulations.ettr --costs paper --out x --nosuch",
        "python -m cluster.local --nodes 2 -- python -m app --config nosuch",
        "sbatch --export=ALL,STORAGE=/x cluster/deploy/slurm/train.sbatch --set nosuch.key=1",
        "kubectl apply -f cluster/deploy/kuberay/nosuch.yaml",
        "rm -r runs",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((WrongCommandError, ConfigError)):
        check_line(line)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_to_pages_that_exist(path: Path) -> None:
    for target in links(path):
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        assert page.exists(), target
        assert not anchor or anchor in _anchors(page), target


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_python_blocks_compile_and_their_settings_hold(path: Path) -> None:
    for block in (block for block in blocks(path) if block.language == "python"):
        for node in ast.walk(ast.parse(block.text)):
            is_settings = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
            if is_settings:
                parse_config(ast.literal_eval(node.value))
            if isinstance(node, ast.keyword) and node.arg == "config" and isinstance(node.value, ast.Dict):
                parse_config(ast.literal_eval(node.value))


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_reference_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == pages()[name], "run `python -m tests.reference`"


def test_every_setting_says_what_it_means() -> None:
    models = {model for _, model in sections()}
    mute = [
        f"{model.__name__}.{name}"
        for model in models
        for name, info in model.model_fields.items()
        if name not in field_texts(model)[0] and not hasattr(info.annotation, "model_fields")
    ]
    assert mute == []


def _models_in(kind: object) -> set[type[BaseModel]]:
    """All models that an annotation names, however deep."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {kind}.union(*(_models_in(info.annotation) for info in kind.model_fields.values()))
    return set().union(*map(_models_in, get_args(kind)))


def test_a_section_that_may_be_null_is_described_like_any_other() -> None:
    assert {model for _, model in sections()} == _models_in(Config)
    page = config_page()
    assert "| `lora` | section | `null` |" in page
    assert "\n## model.lora\n" in page
    assert "\n| `targets` |" in page


def test_every_argument_says_what_it_means() -> None:
    mute = [
        f"{name} {action.option_strings or action.dest}"
        for name in PROGRAMS
        for action in parser_of(name)._actions
        if not action.help and action.option_strings and action.nargs != 0
    ]
    assert mute == []


def _keys(model: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def test_settings_named_in_the_text_exist() -> None:
    fields = {f"{path}.{key}".lstrip(".") for path, model in sections() for key in _keys(model)}
    known = fields | {path for path, _ in sections()}
    named = {
        (page.name, name)
        for page in documents()
        for name in re.findall(
            rf"`(?!\w+\.(?:yaml|py|json)`)((?:{'|'.join(TOP)})\.[a-z_.]+?)(?:=[^`]*)?`", page.read_text()
        )
    }
    assert len(named) > 10
    wrong = {(page, name) for page, name in named if name not in known}
    assert {item for item in wrong if not (ROOT / f"{item[1].replace('.', '/')}.py").exists()} == set()
