"""`layercheck verify`: reads every byte that a recovery could need and checks it as a recovery would."""

from dataclasses import asdict

from layercheck.commands.answer import DAMAGE, GOOD, Answer, size, table
from layercheck.commands.store import Store
from layercheck.coordination.audit import Audit, audit


def verify(store: Store) -> Answer:
    """Checks every live version."""
    facts = store.facts()
    result = audit(store.layercheck, facts)
    value = asdict(result) | {"bad": [asdict(fault) for fault in result.bad]}
    return Answer(value, _text(result), DAMAGE if result.bad or facts.notes else GOOD, facts.notes)


def _text(result: Audit) -> str:
    head = f"{result.checked} shards, {size(result.nbytes)} read and checked: {len(result.bad) or 'none'} bad"
    if not result.bad:
        return head
    rows = [(fault.file, fault.layer or "-", str(fault.step), fault.error) for fault in result.bad]
    return head + "\n\n" + table(("file", "layer", "step", "error"), rows)
