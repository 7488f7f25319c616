"""Command lines, parsed by the real parsers of the programs that they name; nothing is run."""

import argparse
import importlib
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.config import load_config
from cluster.submit import ENTRY

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "layercheck": "layercheck.cli",
    "app": "app.train",
    "app.evaluate": "app.evaluate",
    "cluster.submit": "cluster.submit",
    "cluster.local": "cluster.local",
    "cluster.wait": "cluster.wait",
    "cluster.leave": "cluster.leave",
    "cluster.campaign": "cluster.campaign",
    "simulations.measure": "simulations.measure",
    "simulations.fidelity": "simulations.fidelity.__main__",
    "simulations.ettr": "simulations.ettr",
    "simulations.recommend": "simulations.recommend",
    "simulations.replay": "simulations.replay",
    "simulations.regret": "simulations.regret",
    "simulations.validate": "simulations.validate",
}
"""`python -m NAME`, or the command itself -> the module whose `main` takes the arguments."""
OUTSIDE = {
    ".", "bash", "cd", "docker", "export", "kill", "kubectl", "pip", "python", "python3", "ray", "torchrun",
}  # fmt: skip
"""Other programs that a document may tell a person to run."""


class WrongCommandError(AssertionError):
    """A program would refuse the command."""


class Parsed(BaseException):
    """Leaves a `main` as soon as its parser has done its work; not an Exception, which a `main` may catch."""

    def __init__(self, parser: argparse.ArgumentParser, values: argparse.Namespace, rest: list[str]) -> None:
        super().__init__(parser.prog)
        self.parser, self.values, self.rest = parser, values, rest


@contextmanager
def _stopping(parse: bool) -> Iterator[None]:
    """Within, the outermost call of a parser raises Parsed: after it has parsed, or at once."""
    kept = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    depth = 0

    def stopping(original: Callable[..., Any], leaves_rest: bool) -> Callable[..., Any]:
        def call(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            nonlocal depth
            if depth == 0 and not parse:
                raise Parsed(self, argparse.Namespace(), [])
            depth += 1
            try:
                found = original(self, args, namespace)
            finally:
                depth -= 1
            if depth:
                return found
            raise Parsed(self, *(found if leaves_rest else (found, [])))

        return call

    parser: Any = argparse.ArgumentParser
    parser.parse_args, parser.parse_known_args = stopping(kept[0], False), stopping(kept[1], True)
    try:
        yield
    finally:
        parser.parse_args, parser.parse_known_args = kept


def _enter(program: str, args: list[str], parse: bool) -> Parsed:
    main = importlib.import_module(PROGRAMS[program]).main
    with _stopping(parse):
        try:
            main(args)
        except Parsed as parsed:
            return parsed
        except SystemExit as end:
            raise WrongCommandError(f"{program} {shlex.join(args)}: refused with code {end.code}") from None
    raise WrongCommandError(f"{program} did not parse its arguments")


def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser of a program, as its `main` builds it."""
    return _enter(program, [], parse=False).parser


def check_program(program: str, args: list[str]) -> None:
    """Parses the arguments; a configuration is read and checked, a submitted program's arguments as well.

    Raises:
        WrongCommandError: it would be refused.
        ConfigError: names the setting.
    """
    parsed = _enter(program, args, parse=True)
    if program == "app":
        values = parsed.values
        named = [f"run.name={values.run_name}"] if values.run_name else []
        named += [f"run.storage={values.storage}"] if values.storage else []
        load_config(values.config, [*values.set, *named])
    if program == "cluster.submit" and not (parsed.values.attach or parsed.values.stop):
        check_program(ENTRY[parsed.values.kind], parsed.rest)
    if program == "cluster.local" and parsed.values.command:
        check_words(parsed.values.command)


def check_line(line: str) -> None:
    """Checks one line of a shell block. Raises as `check_program`."""
    check_words(shlex.split(line, comments=True))


def check_words(words: list[str]) -> None:
    """Checks one command."""
    while words and "=" in words[0] and not words[0].startswith(("-", "=")):
        words = words[1:]  # variables before a command
    if "&&" in words:
        at = words.index("&&")
        check_words(words[:at])
        return check_words(words[at + 1 :])
    if not words:
        return None
    for word in words:
        if word.startswith(("cluster/", "tests/", "docs/")) and not (ROOT / word).exists():
            raise WrongCommandError(f"{shlex.join(words)}: there is no {word}")
    if words[0] == "layercheck":
        return check_program("layercheck", words[1:])
    if words[:2] == ["python", "-m"] and words[2] in PROGRAMS:
        return check_program(words[2], words[3:])
    if words[:2] == ["python", "-m"] and words[2] not in ("venv",):
        importlib.import_module(words[2])
        return None
    if words[0] == "sbatch":
        return _check_batch(words)
    if words[0] not in OUTSIDE:
        raise WrongCommandError(f"{shlex.join(words)}: unknown program {words[0]!r}")
    return None


def _check_batch(words: list[str]) -> None:
    """What stands behind the script goes to the app, beside what the script gives it."""
    (at,) = [place for place, word in enumerate(words) if word.endswith(".sbatch")]
    (exported,) = [word for word in words if word.startswith("--export=ALL,")]
    given = dict(item.split("=") for item in exported.removeprefix("--export=ALL,").split(","))
    if "STORAGE" not in given:
        raise WrongCommandError(f"{shlex.join(words)}: the script needs STORAGE")
    args = ["--config", given.get("CONFIG", "tiny"), "--run-name", given.get("RUN_NAME", "x")]
    check_program("app", [*args, "--storage", given["STORAGE"], *words[at + 1 :]])
