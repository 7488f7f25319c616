"""Submits a job to a Ray cluster, follows its log and returns its exit code.

    python -m cluster.submit train --config tiny --run-name first
    python -m cluster.submit ettr --costs paper --out ettr
    python -m cluster.submit train --attach JOB          # follows a job that was submitted before
    python -m cluster.submit train --stop JOB            # ends it; a run saves what moved first

The cluster is RAY_ADDRESS or `--address` (`http://host:8265` or `host:6379`); with token authentication set
RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. The working folder is uploaded, without what
`EXCLUDED` names. Ctrl-C leaves the job alone and says how to follow it again.
"""

import argparse
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

from cluster.follow import Commands, JobFollower
from layercheck.errors import ConfigError, LayerCheckError

ENTRY = {"train": "app", "ettr": "simulations.ettr", "measure": "simulations.measure"}
EXCLUDED = [
    ".venv",
    "runs",
    ".git",
    "**/__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "*.egg-info",
]
PATHS = ("--out", "--costs", "--trace")
"""Arguments of the simulation and the measurements that name files."""
STOP_WAIT_S = 150
"""Seconds between SIGTERM and SIGKILL of a job, in place of Ray's 3: a run makes its last save."""


class SubmitError(LayerCheckError):
    """The cluster cannot be reached or refuses the job."""


def submit(
    address: str | None,
    kind: str,
    args: list[str],
    env: dict[str, str] | None = None,
    runtime_env: Path | None = None,
) -> JobFollower:
    """Submits one job and returns what follows it.

    Args:
        address: of the cluster; None for RAY_ADDRESS.
        kind: a key of `ENTRY`.
        args: of the program; local paths are made absolute, since the job runs in another folder.
        env: more variables for the job.
        runtime_env: a YAML file with more of Ray's runtime environment, such as pinned packages.

    Raises:
        SubmitError: nobody answers at the address, or the job is refused.
        ConfigError: no address is known, or the file is wrong.
    """
    place = _address(address)
    program = with_absolute_storage(args) if kind == "train" else with_absolute_paths(args)
    environment = job_environment(runtime_env, env or {})
    try:
        client = _client(place)
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", ENTRY[kind], *program]), runtime_env=environment
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise SubmitError(f"cannot submit to {place}: {error}", address=place) from error
    print(f"job {job} submitted", flush=True)
    given = ["--runtime-env", str(runtime_env)] if runtime_env else []
    return JobFollower(client, job, _commands(address, kind, job, [*given, *args]))


def attach(address: str | None, kind: str, job: str) -> JobFollower:
    """Returns what follows, or stops, a job that somebody submitted before.

    Raises:
        SubmitError: nobody answers at the address, or it knows no such job.
        ConfigError: no address is known.
    """
    place = _address(address)
    try:
        client = _client(place)
        client.get_job_status(job)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise SubmitError(f"no job {job} at {place}: {error}", address=place, job=job) from error
    return JobFollower(client, job, _commands(address, kind, job, None))


def job_environment(file: Path | None, env: dict[str, str]) -> dict[str, Any]:
    """Ray's runtime environment of a job: this folder, what `file` adds, and more variables.

    Raises:
        ConfigError: the file cannot be read, or sets what is decided here.
    """
    given = _read_runtime_env(file) if file else {}
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **given.get("env_vars", {}), **env}
    return {**given, "working_dir": str(Path.cwd()), "excludes": EXCLUDED, "env_vars": variables}


def _read_runtime_env(file: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--runtime-env {file}: {error}", path=str(file)) from None
    if not isinstance(given, dict):
        raise ConfigError(f"--runtime-env {file} must hold keys such as pip and env_vars", path=str(file))
    if taken := {"working_dir", "excludes"} & given.keys():
        raise ConfigError(
            f"--runtime-env {file}: {sorted(taken)} are set by this command, which uploads the folder that "
            "it runs in: leave them out",
            path=str(file),
        )
    return given


def _address(address: str | None) -> str:
    found = address or os.environ.get("RAY_ADDRESS")
    if not found:
        raise ConfigError("no cluster: set RAY_ADDRESS or pass --address http://host:8265")
    return found


def _commands(address: str | None, kind: str, job: str, args: list[str] | None) -> Commands:
    ours = ["python", "-m", "cluster.submit", kind, *(["--address", address] if address else [])]
    return Commands(
        resume="" if args is None else shlex.join([*ours, *args]),
        attach=shlex.join([*ours, "--attach", job]),
        stop=shlex.join([*ours, "--stop", job]),
    )


def _client(address: str) -> JobSubmissionClient:
    # Ray lets these variables override the address that it is given: a job for a private cluster would land
    # on whatever cluster the shell happens to name.
    hidden = {name: os.environ.pop(name, None) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    # It lists every ignored file of the upload.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update({name: value for name, value in hidden.items() if value is not None})


def with_absolute_storage(args: list[str]) -> list[str]:
    """Adds or rewrites `--storage` so that it means the same folder wherever the job runs."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--storage")
    known.add_argument("--config")
    known.add_argument("--set", action="append", default=[])
    found, _ = known.parse_known_args(args)
    if found.storage is None and any(item.startswith("run.storage=") for item in found.set):
        raise ConfigError("pass the storage as --storage, not by --set run.storage=...")
    storage = found.storage or _configured_storage(found.config)
    if "://" in storage:
        return args
    return [*_without(args, "--storage"), "--storage", str(Path(storage).expanduser().absolute())]


def with_absolute_paths(args: list[str]) -> list[str]:
    """Rewrites the values of `PATHS` that are local: the job runs in a folder that is gone after it."""
    result = list(args)
    for place, arg in enumerate(result):
        flag, is_joined, value = arg.partition("=")
        if flag not in PATHS:
            continue
        if is_joined:
            result[place] = f"{flag}={_absolute(flag, value)}"
        elif place + 1 < len(result):
            result[place + 1] = _absolute(flag, result[place + 1])
    return result


def _absolute(flag: str, value: str) -> str:
    """A folder to write to need not exist yet; costs may also be a name, and a store a URI."""
    path = Path(value).expanduser()
    return str(path.absolute()) if flag == "--out" or path.exists() else value


def _configured_storage(config: str | None) -> str:
    if config is None:
        return "runs"
    path = Path(config) if config.endswith((".yaml", ".yml")) else Path("app/configs") / f"{config}.yaml"
    settings = yaml.safe_load(path.read_text()) if path.is_file() else None
    run = settings.get("run") if isinstance(settings, dict) else None
    return str(run.get("storage", "runs")) if isinstance(run, dict) else "runs"


def _without(args: list[str], flag: str) -> list[str]:
    kept, skip = [], False
    for arg in args:
        if not skip and arg != flag and not arg.startswith(f"{flag}="):
            kept.append(arg)
        skip = arg == flag and not skip
    return kept


def main(argv: list[str] | None = None) -> int:
    """The command line; everything after the kind that is not ours goes to the program."""
    parser = argparse.ArgumentParser(prog="python -m cluster.submit", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=sorted(ENTRY))
    parser.add_argument("--address", help="default: RAY_ADDRESS")
    parser.add_argument("--limit-s", type=float, help="stop following after this long; the job goes on")
    parser.add_argument("--runtime-env", type=Path, metavar="FILE", help="YAML: more of Ray's runtime_env")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--attach", metavar="JOB", help="follow this job, submit none")
    earlier.add_argument("--stop", metavar="JOB", help="end this job: a run saves what moved first")
    ours, program_args = parser.parse_known_args(argv)
    if (ours.attach or ours.stop) and (program_args or ours.runtime_env):
        parser.error("--attach and --stop submit nothing: they take only --address and --limit-s")
    try:
        if ours.stop:
            return attach(ours.address, ours.kind, ours.stop).stop(ours.limit_s)
        if ours.attach:
            return attach(ours.address, ours.kind, ours.attach).follow(ours.limit_s)
        job = submit(ours.address, ours.kind, program_args, runtime_env=ours.runtime_env)
        return job.follow(ours.limit_s)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
