"""[pure] What is run: each method at its operating points, for how long, and in which order.

Regimes: `every_step` (a decision or a commit at every step) and `own` (as often as the method's own paper
says). Where both come to the same settings one arm serves both. Recoveries are timed at matched freshness: a
method that rolls back saves as often as LayerCheck writes a layer on average, and is killed in the middle of
an interval. `none` trains with stock optimizer groups, as a run without any of this does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from layercheck.errors import ConfigError

REFERENCE = "none"
METHODS = (
    REFERENCE,
    "layercheck",
    "deepspeed",
    "dcp_async",
    "checkfreq",
    "gemini",
    "lowdiff_topk",
    "lowdiff_dense",
)
NEEDED = (REFERENCE, "layercheck")
"""Measured whatever was asked for: ratios are to the first, the second gives the interval of recoveries."""
REGIMES = ("every_step", "own")
OWN_INTERVAL = 100
"""Steps. OpenThinker-7B saved so often with DeepSpeed; LowDiff's bases; DCP recommends nothing."""
_LOWDIFF = ("lowdiff_topk", "lowdiff_dense")
_AFTER_KILL = 8
"""Steps that a killed run makes beyond where it was."""


@dataclass(frozen=True, slots=True)
class Length:
    """How much is measured.

    Attributes:
        settle: steps before the measured ones; of LayerCheck its warm-up.
        window: measured steps of an arm that saves at every step.
        target_interval: LayerCheck's, in steps; it is measured for two of them.
        profile: steps that CheckFreq times before it decides.
        rounds: blocks of each arm without a kill; `kill_rounds` with one.
    """

    settle: int
    window: int
    target_interval: int
    profile: int
    rounds: int
    kill_rounds: int


FULL = Length(settle=20, window=40, target_interval=106, profile=20, rounds=3, kill_rounds=3)
QUICK = Length(settle=10, window=30, target_interval=24, profile=10, rounds=1, kill_rounds=1)


@dataclass(frozen=True, slots=True)
class Arm:
    """A method at one operating point, and how long a block of it is.

    Attributes:
        name: of the arm, such as `deepspeed-own`; `method` is one of `METHODS`.
        regimes: that it stands for; none for a killed run.
        settings: `--set` items.
        settle: steps that are not measured; `window`: those that are, after them.
        kill_step: the run loses rank 1 after this step.
    """

    name: str
    method: str
    regimes: tuple[str, ...]
    settings: tuple[str, ...]
    settle: int
    window: int
    kill_step: int | None = None

    @property
    def steps(self) -> int:
        """Number of the last step."""
        return self.settle + self.window


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods to measure, `NEEDED` among them, in the order of `METHODS`.

    Raises:
        ConfigError: there is no such method.
    """
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ConfigError(f"--methods {unknown[0]!r} is none of {', '.join(METHODS)}")
    return tuple(name for name in METHODS if name in names or name in NEEDED)


# ---------------------------------------------------------------- without a kill


def steady_arms(methods: Sequence[str], length: Length) -> list[Arm]:
    """The arms of both regimes."""
    return [arm for method in methods for arm in _steady(method, length)]


def _steady(method: str, length: Length) -> list[Arm]:
    settle, window = length.settle, length.window
    if method == REFERENCE:
        return [Arm(method, method, REGIMES, _settings(method, length), settle, window)]
    if method == "layercheck":
        return [Arm(method, method, REGIMES, _settings(method, length), settle, 2 * length.target_interval)]
    if method == "gemini":
        settings = _settings(method, length, interval_steps=1)
        return [Arm(method, method, REGIMES, settings, settle, window)]
    if method in _LOWDIFF:
        settings = _settings(method, length, batch=1, base_every=OWN_INTERVAL)
        return [Arm(method, method, REGIMES, settings, settle, OWN_INTERVAL)]
    if method == "checkfreq":
        dense = _settings(method, length, mode="manual", interval_steps=1)
        tuned = _settings(method, length, mode="auto", profile_from=5, profile_steps=length.profile)
        return [
            Arm(f"{method}-every-step", method, ("every_step",), dense, settle, window),
            # The profile ends with a checkpoint that training waits for; what follows is measured.
            Arm(f"{method}-own", method, ("own",), tuned, 5 + length.profile, window),
        ]
    return [
        Arm(
            f"{method}-every-step",
            method,
            ("every_step",),
            _settings(method, length, interval_steps=1),
            settle,
            window,
        ),
        # One whole interval: with its one commit in it, and the steps beside which that is written.
        Arm(
            f"{method}-own",
            method,
            ("own",),
            _settings(method, length, interval_steps=OWN_INTERVAL),
            settle,
            OWN_INTERVAL,
        ),
    ]


# ---------------------------------------------------------------- with a kill


def killed_arms(methods: Sequence[str], length: Length, interval: int) -> list[Arm]:
    """One killed run of each method at matched freshness; `interval` in steps."""
    return [_killed(method, length, interval) for method in methods]


def _killed(method: str, length: Length, interval: int) -> Arm:
    if method == REFERENCE:
        # Nothing comes back: only its detection and restart are of interest.
        begin, settings = length.settle, _settings(method, length)
    elif method == "layercheck":
        begin, settings = length.settle + interval + interval // 2, _settings(method, length)
    elif method in _LOWDIFF:
        begin = interval + interval // 2
        settings = _settings(method, length, batch=1, base_every=interval)
    else:
        begin = interval + interval // 2
        manual = {"mode": "manual"} if method == "checkfreq" else {}
        settings = _settings(method, length, interval_steps=interval, **manual)
    kill = f"faults.kill=[{{rank: 1, step: {begin}}}]"
    return Arm(f"{method}-killed", method, (), (*settings, kill), begin, _AFTER_KILL, kill_step=begin)


# ---------------------------------------------------------------- settings


def _settings(method: str, length: Length, **own: int | str) -> tuple[str, ...]:
    """`--set` items of a method: for all alike, of the method, of its point."""
    if method == REFERENCE:
        return ("checkpoint.method=none", "train.groups=stock")
    if method == "layercheck":
        return (f"checkpoint.method={method}", *(f"checkpoint.settings.{item}" for item in _ours(length)))
    section, _, mode = method.partition("_") if method in _LOWDIFF else (method, "", "")
    items = own | ({"mode": mode} if mode else {})
    pairs = (f"checkpoint.baseline.{section}.{key}={value}" for key, value in items.items())
    return (f"checkpoint.method={section}", *pairs)


def _ours(length: Length) -> tuple[str, ...]:
    return (
        f"warmup_steps={length.settle}",
        f"warmup_full_every={length.settle}",
        f"target_interval={length.target_interval}",
        f"s_max={4 * length.target_interval}",
        "embedding_factor=1",
        "full_every=0",
    )


# ---------------------------------------------------------------- order


def passes(
    length: Length, steady: Sequence[str], killed: Sequence[str], seed: int
) -> list[list[tuple[str, int]]]:
    """The order of the blocks: (arm, which repeat of it), each pass shuffled by itself.

    A pass holds each arm at most once, so what changes on the machine meets all methods alike. The first has
    no kill: it gives the interval at which recoveries are compared.
    """
    rng = random.Random(seed)
    found = []
    for number in range(max(length.rounds, length.kill_rounds + 1)):
        blocks = [(name, number) for name in steady if number < length.rounds]
        blocks += [(name, number - 1) for name in killed if 0 < number <= length.kill_rounds]
        rng.shuffle(blocks)
        found.append(blocks)
    return found
