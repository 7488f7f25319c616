"""Random kills of random parts during a real run, and the proof that nothing was lost.

    python -m cluster.campaign --kills 50 --seed 1 --json campaign.json

A tiny model trains on a private Ray head. Each kill hits a worker (SIGKILL or SIGSTOP), all workers, the
coordinator, a vault, the driver or the whole head, at a random moment, at times in the middle of the recovery
from the kill before. Ray restarts what it can; a driver that is gone is submitted again. After each recovery
the judge (`campaign_checks.py`) compares ages, versions and bytes with what the ranks noted themselves. Exit
code 0: every kill was recovered from, nothing was lost or wrong, nothing hung.
"""

# ruff: noqa: T201
import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.campaign_checks import Judge
from cluster.campaign_run import CampaignRun, Death
from cluster.locks import prepare_extensions
from layercheck.errors import LayerCheckError

WEIGHTS = {
    "worker": 30,
    "all workers": 10,
    "stopped worker": 15,
    "coordinator": 20,
    "driver": 15,
    "head": 10,
    "vault": 20,
}
"""How often each part is hit, relative to the others; vaults are there with the memory tier alone."""

RECOVERY_LIMIT_S = 240.0
"""A run that has made no new step for so long after a kill counts as a hang."""
_MAX_HANGS = 3
"""After so many the campaign ends; a run that always hangs is not killed for ever."""
_IN_RECOVERY = 0.3
"""Share of the kills that hit while the run still recovers from the one before."""
_MAX_PAUSE_S = 8.0
_MAX_STEPS_BETWEEN = 12
_LOOK_S = 0.3
_NODES = 1
"""Of the cluster; so many folders in shared memory are in use when the run is stopped in its midst."""
_RESTART_LOOP = "attempts in a row recovered and ended"


@dataclass
class Score:
    """What a campaign counted so far."""

    kills: int = 0
    recovered: int = 0
    hangs: int = 0
    own_ends: list[str] = field(default_factory=list)


class Campaign:
    """Kills, waits, judges.

    Args:
        run: what is killed.
        kills: how many are delivered.
        seed: of the parts and the moments. Where a kill then finds the run is up to the machine.
        recovery_limit_s: see `RECOVERY_LIMIT_S`.
        has_vaults: the run has a memory tier.
    """

    def __init__(
        self,
        run: CampaignRun,
        kills: int,
        seed: int,
        recovery_limit_s: float = RECOVERY_LIMIT_S,
        has_vaults: bool = False,
    ) -> None:
        self._run, self._kills = run, kills
        self._weights = {part: w for part, w in WEIGHTS.items() if part != "vault" or has_vaults}
        self._rng = random.Random(seed)
        self._limit_s = recovery_limit_s
        self._judge = Judge(run.store, run.witness)
        self._open: list[Death] = []
        self._began_s = time.monotonic()
        self.score = Score()

    def go(self) -> dict[str, Any]:
        """The whole campaign; returns the result."""
        self._run.start()
        if not self._wait_for_steps():
            raise LayerCheckError(
                f"the run made no step within {self._limit_s:g} s: {self._run.last_words()}"
            )
        first_s = time.monotonic() - self._began_s
        print(f"the run trains after {first_s:.0f} s; {self._kills} kills follow", flush=True)
        self._train_on(self._run.position()[1] + self._rng.randint(0, _MAX_STEPS_BETWEEN))
        while self.score.kills < self._kills and self.score.hangs < _MAX_HANGS:
            self._kill()
            if self._rng.random() < _IN_RECOVERY and self.score.kills < self._kills:
                time.sleep(self._rng.uniform(0, _MAX_PAUSE_S))
                continue
            self._recover()
        return self._result(time.monotonic() - self._began_s - first_s)

    # ------------------------------------------------------------------ one kill

    def _kill(self) -> None:
        parts, weights = list(self._weights), list(self._weights.values())
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            self._run.start()
            self._keep_going()
            (part,) = self._rng.choices(parts, weights)
            death = self._run.kill(part, self._rng)
            if death is not None:
                self.score.kills += 1
                self._open.append(death)
                when = "in a recovery" if len(self._open) > 1 else f"at step {death.step}"
                print(f"kill {self.score.kills}/{self._kills}: {part} ({death.detail}) {when}", flush=True)
                self._run.start()
                return
            time.sleep(_LOOK_S)
        self._hang("nothing was there to be killed")

    # ------------------------------------------------------------------ recoveries

    def _recover(self) -> None:
        """Waits until all open kills are behind the run, judges, and lets it train for a while."""
        began_s = time.monotonic()
        if not self._wait_for_steps():
            self._hang(f"after {[death.part for death in self._open]}")
            return
        self.score.recovered += len(self._open)
        self._open = []
        self._judge.look()
        attempt, step = self._run.position()
        verdict = self._judge.verdict
        print(
            f"  recovered in {time.monotonic() - began_s:.1f} s: attempt {attempt}, step {step}, largest age "
            f"so far {verdict.max_age}, {len(verdict.problems)} problems",
            flush=True,
        )
        if self.score.kills < self._kills:
            self._train_on(step + self._rng.randint(0, _MAX_STEPS_BETWEEN))

    def _wait_for_steps(self) -> bool:
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            if all(self._is_behind(death) for death in self._open) and self._run.position()[1] > 0:
                return True
            self._keep_going()
            time.sleep(_LOOK_S)
        return False

    def _is_behind(self, death: Death) -> bool:
        """A step beyond the last one that counted as done before the kill was completed."""
        for life in self._run.lives():
            t_fail = life.plan["t_fail"] if life.plan else 0
            if life.rank == 0 and life.attempt > death.attempt and life.steps and life.steps[-1][0] > t_fail:
                return True
        # These come back without a new attempt: the run has to get on, and to be heard of again.
        is_actor = death.part in ("coordinator", "vault")
        return is_actor and self._journaled_step(death.attempt) > death.step + 1

    def _journaled_step(self, attempt: int) -> int:
        path = self._run.store / "attempts" / f"a{attempt:03d}.progress.json"
        return int(json.loads(path.read_text())["step"]) if path.exists() else 0

    def _train_on(self, until: int) -> None:
        deadline = time.monotonic() + self._limit_s
        while self._run.position()[1] < until and time.monotonic() < deadline:
            self._keep_going()
            time.sleep(_LOOK_S)
        self._judge.look()

    def _keep_going(self) -> None:
        """A driver that ended by itself is submitted again, and noted unless it had to end."""
        code = self._run.driver_ended()
        if code is not None:
            words = self._run.last_words()
            print(f"  the driver ended with code {code}; submitted again", flush=True)
            if _RESTART_LOOP not in words:
                self.score.own_ends.append(f"the driver ended with code {code}: {words}")
            self._run.start()

    def _hang(self, what: str) -> None:
        self.score.hangs += 1
        self._open = []
        print(f"  HANG: no new step within {self._limit_s:g} s {what}; started anew", flush=True)
        self._run.stop()
        self._run.start()
        self._wait_for_steps()

    def _result(self, seconds: float) -> dict[str, Any]:
        # Nobody deletes any more while the history is judged.
        self._run.stop()
        self._judge.finish()
        verdict = self._judge.verdict
        left = self._run.memory_left()
        if len(left) > _NODES:
            verdict.problems.append(f"{len(left)} folders in shared memory for {_NODES} node: {left}")
        return {
            "kills": self.score.kills,
            "recovered": self.score.recovered,
            "lost_versions": verdict.lost_versions,
            "wrong_bytes": verdict.wrong_bytes,
            "hangs": self.score.hangs,
            "max_age": verdict.max_age,
            "compared": verdict.compared,
            "lost_residuals": verdict.lost_residuals,
            "compared_residuals": verdict.compared_residuals,
            "seconds": round(seconds, 1),
            "seconds_per_kill": round(seconds / max(1, self.score.kills), 1),
            "problems": [*verdict.problems, *self.score.own_ends],
        }


def is_good(result: dict[str, Any]) -> bool:
    """Every kill was recovered from, and nothing was found."""
    return result["recovered"] == result["kills"] and not result["hangs"] and not result["problems"]


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if the campaign is good."""
    args = _arguments(arguments)
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _leave)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="campaign-")).absolute()
    run = CampaignRun(folder, tuple(args.set))
    try:
        prepare_extensions(folder / "storage" / "campaign")
        result = Campaign(run, args.kills, args.seed, args.recovery_limit_s, _has_vaults(args.set)).go()
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        run.stop()
        run.memory_left()
    for problem in result["problems"]:
        print(f"NOT as it should be: {problem}", file=sys.stderr)
    print(json.dumps({key: value for key, value in result.items() if key != "problems"}))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2))
    if is_good(result) and args.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"the run's files are in {folder}")
    return 0 if is_good(result) else 1


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m cluster.campaign", description="Kill a run again and again.")
    parser.add_argument("--kills", type=int, default=3, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--json", metavar="FILE", help="writes the result, problems included")
    parser.add_argument("--folder", metavar="DIR", help="keeps the run's files here; must be new")
    parser.add_argument(
        "--recovery-limit-s", type=float, default=RECOVERY_LIMIT_S, help="a longer one counts as a hang"
    )
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="key.path=value", help="settings of the run"
    )
    args = parser.parse_args(arguments)
    if args.kills < 1:
        parser.error(f"--kills {args.kills} must be at least 1")
    if args.folder and Path(args.folder).exists() and any(Path(args.folder).iterdir()):
        parser.error(f"--folder {args.folder} is not empty: what lies there would be judged as well")
    return args


def _has_vaults(settings: list[str]) -> bool:
    return any(item.replace(" ", "").endswith("memory.enabled=true") for item in settings)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Lets `finally` end the head on a signal that would otherwise just end this process."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
