"""[pure] The tables of an experiment for people, as Markdown."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

_TITLES = {
    "cascade": "Three cascading recoveries (paper, figure 5a)",
    "thresholds": "One recovery at three thresholds (paper, figure 5b)",
    "benchmarks": "Benchmark scores (paper, table 3)",
    "selection": "How layers are selected, at equal bytes",
    "moments": "The stale first moment at a recovery",
}


def markdown(content: Mapping[str, Any]) -> str:
    """All tables of one experiment but the heat map."""
    conditions = content["conditions"]
    length = conditions["length"]
    reference = content["references"][content["arm"]]
    lines = [
        f"# {_TITLES[content['experiment']]}",
        "",
        f"{conditions['seeds']} seeds; {length['steps']} steps of fine-tuning after {length['base_steps']} "
        f"from scratch; mean held-out loss {reference['start_loss']:.4f} -> "
        f"{mean(reference['final_loss']):.4f} without failures ({reference['improvement']:.1%} lower); "
        f"standard deviation over the seeds {reference['seed_spread']:.2%}, range "
        f"{reference['seed_range']:.2%}.",
        "",
        *_table(_LOSS_HEAD, [_loss_row(name, arm) for name, arm in content["arms"].items()]),
        "",
        "Deviations are of the final held-out loss, paired by seed; +-: standard error. Jump: rise of the "
        "loss at a recovery. Failures that come at the greatest age come at that of seed "
        f"{conditions['failures_chosen_on_seed']}, after the same steps in the runs of all seeds.",
        "",
        *_table(_SCORE_HEAD, [_score_row(name, content) for name in content["arms"]]),
        "",
        f"## Asked of `{content['arm']}`",
        "",
        *[f"- {'yes' if held else '**no**'}: {text}" for text, held in content["verdicts"].items()],
    ]
    if ratios := content["byte_ratios"]:
        lines += ["", "Bytes written without failures, over those of the arm that they are to equal:", ""]
        lines += [f"- {name}: {ratio:.3f}" for name, ratio in ratios.items()]
    if worse := content["worse_than_the_first_arm"]:
        lines += ["", f"Worse than `{content['arm']}` by more than two standard errors:", ""]
        lines += [f"- {name}: {'yes' if held else 'no'}" for name, held in worse.items()]
    return "\n".join(lines) + "\n"


_LOSS_HEAD = (
    "arm", "deviation by seed (%)", "mean (%)", "largest (%)", "improvement lost (%)", "lost steps",
    "mean age", "oldest", "jump (%)", "MB written",
)  # fmt: skip
_SCORE_HEAD = ("arm", "score without failures", "spread", "score recovered", "difference")


def _loss_row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        ", ".join(f"{100 * value:+.2f}" for value in arm["final_loss_deviation"]),
        f"{100 * arm['mean_deviation']:+.3f} +- {100 * arm['deviation_error']:.3f}",
        f"{100 * arm['largest_deviation']:.2f}",
        f"{100 * arm['fraction_of_improvement_lost']:.2f}",
        f"{mean(arm['lost_steps']):.1f}",
        f"{arm['weighted_age']:.1f}",
        f"{arm['max_age']}",
        f"{100 * arm['jump']:+.2f}",
        f"{arm['bytes_written'] / 1e6:.1f}",
    )


def _score_row(name: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    arm, reference = content["arms"][name], content["references"][name]
    return (
        name,
        f"{100 * mean(reference['accuracy']):.1f} %",
        f"{100 * reference['accuracy_spread']:.1f}",
        f"{100 * mean(arm['accuracy']):.1f} %",
        f"{100 * mean(arm['accuracy_deviation']):+.1f}",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
