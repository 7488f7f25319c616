"""The `layercheck` command: looks at a store, plans, checks, collects. Reads storage alone.

Exit codes: 0 good, 1 damage or no plan, 2 usage.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.coordination import journal, restarts
from layercheck.coordination.audit import audit
from layercheck.coordination.collect import Verdict
from layercheck.coordination.collector import Collector
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import PlanRequest, is_fresh, make_plan
from layercheck.coordination.status import summarize
from layercheck.coordination.takeover import refuse_if_live
from layercheck.errors import ConfigError, LayerCheckError, NoPlanError, StorageError
from layercheck.manifest import RecoveryPlan
from layercheck.persistence.storage import Storage, open_store

GOOD, DAMAGE, USAGE = 0, 1, 2
_GC_WATCH_S = 10.0
_WATCH_EVERY_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        storage = open_store(options.store)
        if storage.size(journal.RUN_FILE) is None and not journal.event_folders(storage):
            print(f"layercheck: {options.store} holds no run", file=sys.stderr)
            return USAGE
        code: int = options.act(storage, options)
        return code
    except LayerCheckError as error:
        print(f"layercheck: {error.message}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else DAMAGE
    except KeyboardInterrupt:
        return GOOD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="layercheck", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[Storage, Any], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("store", metavar="STORE", help="run folder, or the layercheck folder inside it")
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=act)
        return made

    status = command("status", _status, "newest version of each layer, ages, whether a plan exists")
    status.add_argument("--watch", action="store_true", help="print again every 5 s")
    plan = command("plan", _plan, "what a recovery would load now (changes nothing)")
    plan.add_argument("--mode", choices=["composite", "uniform", "strict"], default="composite")
    plan.add_argument("--at-step", type=int, metavar="N", help="as if the run had failed at step N")
    plan.add_argument("--max-age", type=int, metavar="N", help="refuse a plan with an older layer")
    plan.add_argument("--without", nargs="+", action="extend", default=[], metavar="FILE")
    plan.add_argument("--world-size", type=int, metavar="W")
    command("verify", _verify, "reads and checks every live shard")
    gc = command("gc", _gc, "deletes what no plan can need")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


# ---------------------------------------------------------------- commands


def _status(storage: Storage, options: argparse.Namespace) -> int:
    while True:
        facts = journal.load_facts(storage)
        summary = summarize(facts)
        _note(facts)
        _show(options, summary, _status_lines(summary))
        if not options.watch:
            return GOOD if summary["recoverable"] or is_fresh(facts) else DAMAGE
        time.sleep(_WATCH_EVERY_S)


def _plan(storage: Storage, options: argparse.Namespace) -> int:
    facts = journal.load_facts(storage)
    _note(facts)
    limit = options.max_age if options.max_age is not None else _settings(facts).strict_max_age
    request = PlanRequest(
        world_size=options.world_size,
        mode=options.mode,
        strict_max_age=limit,
        max_age=None if options.mode == "strict" else options.max_age,
        at_step=options.at_step,
        without=frozenset(_below(storage, file) for file in options.without),
    )
    plan = make_plan(facts, request)
    if plan is None:
        raise NoPlanError(f"run {facts.run.name} holds no step yet: it would start afresh")
    _show(options, plan_as_dict(plan), _plan_lines(plan))
    return GOOD


def _verify(storage: Storage, options: argparse.Namespace) -> int:
    facts = journal.load_facts(storage)
    _note(facts)
    result = audit(storage, facts)
    lines = [f"{fault.file} {fault.layer} of step {fault.step}: {fault.error}" for fault in result.bad]
    lines.append(f"{result.checked} shards, {result.nbytes} bytes checked; {len(result.bad)} bad")
    _show(options, asdict(result), lines)
    return DAMAGE if result.bad else GOOD


def _gc(storage: Storage, options: argparse.Namespace) -> int:
    facts = journal.load_facts(storage)
    _note(facts)
    collector = Collector(storage, _settings(facts))
    decided = collector.decide(facts)
    shown = {
        "delete": [_verdict(storage, verdict) for verdict in decided.delete],
        "keep": [_verdict(storage, verdict) for verdict in decided.keep],
    }
    if not options.dry_run:
        _refuse_collection(storage, facts)
        collector.run(facts)
    did = "would be deleted" if options.dry_run else "deleted"
    lines = [f"{row['event']}: {row['nbytes']} bytes {did}: {row['reason']}" for row in shown["delete"]]
    lines += [f"{row['event']}: kept: {row['reason']}" for row in shown["keep"]]
    _show(options, shown, lines)
    return GOOD


def _refuse_collection(storage: Storage, facts: StoreFacts) -> None:
    """Only a living coordinator deletes beside a run, and nothing goes while the state is in doubt (I13)."""
    newest = facts.newest
    if newest is None:
        return
    beat = facts.progress.get(newest.attempt)
    if beat is not None and beat.ended == "failed" and restarts.is_poison(beat.reason):
        raise StorageError(f"the run ended by a non-finite state ({beat.reason}): recover it first")
    recovered = not is_fresh(facts, newest)
    if recovered and (beat.step if beat else 0) < newest.r_b + _settings(facts).probation_steps:
        raise StorageError(f"attempt {newest.attempt} is on probation after its recovery: collect later")
    refuse_if_live(storage, newest, facts.run.name, _GC_WATCH_S, time.monotonic, time.sleep, lambda _: None)


# ---------------------------------------------------------------- what is printed


def plan_as_dict(plan: RecoveryPlan) -> dict[str, Any]:
    """The keys of `layercheck plan --json`."""
    keys = ("mode", "t_fail", "t_fail_source", "resume_step", "world_size")
    figures = ("max_age", "weighted_age", "lost_steps", "nbytes")
    layers = [
        {
            "name": layer.layer,
            "step": layer.step,
            "attempt": layer.attempt,
            "age": layer.age,
            "nbytes": layer.nbytes,
            "files": [shard.file for shard in layer.shards],
            "fallback": layer.fallback,
        }
        for layer in plan.layers
    ]
    return {key: getattr(plan, key) for key in (*keys, *figures)} | {"layers": layers}


def _plan_lines(plan: RecoveryPlan) -> list[str]:
    lines = [
        f"{plan.mode}: failed after step {plan.t_fail} ({plan.t_fail_source}), resumes with step "
        f"{plan.resume_step}; oldest layer {plan.max_age} steps, weighted age {plan.weighted_age:.2f}, lost "
        f"steps {plan.lost_steps:.2f}, {plan.nbytes} bytes to read"
    ]
    for layer in plan.layers:
        mark = "  (fallback: a newer version is damaged)" if layer.fallback else ""
        lines.append(
            f"  {layer.layer:<28} step {layer.step:>8} a{layer.attempt:03d} age {layer.age:>6}{mark}"
        )
    return lines


def _status_lines(summary: dict[str, Any]) -> list[str]:
    able = "recoverable" if summary["recoverable"] else "NOT recoverable"
    lines = [
        f"run {summary['run']}: attempt {summary['attempt']}, step {summary['step']}, "
        f"{summary['world_size']} ranks, {able}, {summary['read_bytes']} bytes to read"
    ]
    for row in summary["layers"]:
        lines.append(f"  {row['name']:<28} step {row['step']:>8} age {row['age']:>6}  {row['reason']}")
    return lines


def _show(options: argparse.Namespace, value: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(_plain(value)) if options.json else "\n".join(lines), flush=True)


def _plain(value: Any) -> Any:
    """Standard JSON has no infinity: a layer that is due by a lost event shows null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _note(facts: StoreFacts) -> None:
    for note in facts.notes:
        print(f"layercheck: {note}", file=sys.stderr)


def _verdict(storage: Storage, verdict: Verdict) -> dict[str, Any]:
    folder = verdict.event.folder
    sizes = [storage.size(f"{folder}/{name}") or 0 for name in storage.list(folder)]
    return {"event": folder, "nbytes": sum(sizes), "reason": verdict.reason}


def _settings(facts: StoreFacts) -> LayerCheckConfig:
    return parse_config(facts.run.config.get("checkpoint"))


def _below(storage: Storage, file: str) -> str:
    """A file as commits name it, from a path below the store or a full one."""
    _, mark, rest = file.partition(storage.root.rstrip("/") + "/")
    return rest if mark else file.removeprefix("./").removeprefix("layercheck/")


if __name__ == "__main__":
    sys.exit(main())
