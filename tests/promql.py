"""What a PromQL expression asks for, without a Prometheus."""

import re
from dataclasses import dataclass

_WORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "offset",
    "bool",
    "and",
    "or",
    "unless",
}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LABELS = re.compile(r"\{([^{}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^()]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]|\b\d+(?:\.\d+)?(?:ms|[smhdwy])\b")
_NAME = re.compile(r"(?<![\w.$])[A-Za-z_:][\w:]*")
_CALL = re.compile(r"[A-Za-z_]\w*\s*\(")


@dataclass(frozen=True)
class Asked:
    """Metrics and labels by name."""

    metrics: frozenset[str]
    labels: frozenset[str]


def asked(expression: str) -> Asked:
    """The names in one expression; a text of an unbalanced form is an error."""
    assert all(expression.count(a) == expression.count(b) for a, b in ("()", "[]", "{}")), expression
    text = _STRING.sub('""', expression)
    labels = {name for inner in _LABELS.findall(text) for name in _NAME.findall(inner)}
    labels |= {name for inner in _GROUPING.findall(text) for name in _NAME.findall(inner)}
    bare = _RANGE.sub(" ", _GROUPING.sub(" ", _LABELS.sub(" ", text)))
    called = {call.rstrip("( \n") for call in _CALL.findall(bare)}
    metrics = set(_NAME.findall(bare)) - called - _WORDS
    return Asked(frozenset(metrics), frozenset(labels))
