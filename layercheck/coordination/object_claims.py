"""Claims on stores that cannot create a name exclusively: the record's name carries its claimant's token.

One claim, by one claimant:
1. list; if anybody holds this number, it is not ours. The clock of `_LATEST_PUT_S` runs from here.
2. PUT the record under its own name. A crash from here on leaves a claim that nobody uses, and its number.
3. slower than `_LATEST_PUT_S`? Then a rival may have counted without us: withdraw, try under another number.
4. wait `_SETTLE_S`, which is longer than any PUT that counts, and list again: the lowest token has won.

What two clocks may disagree on decides nothing: each measures only its own seconds. Should two claimants win
all the same (a store whose lists lag), the higher token's commits are dead by lineage (I15).
"""

import re

from layercheck.coordination.timer import REAL_TIME, Timer
from layercheck.persistence.storage import Storage

_NAME = re.compile(r"a(\d{3,})\.([0-9a-f]{32})\.(json|withdrawn)")
_FOLDER = "attempts"
_LATEST_PUT_S = 0.5
_SETTLE_S = 1.0


def claim(storage: Storage, attempt: int, token: str, record: bytes, timer: Timer = REAL_TIME) -> bool:
    """Claims a number; False if it is somebody else's or the store was too slow to be sure."""
    started = timer.clock()
    if attempt in numbers(storage):
        return False
    mine = _name(attempt, token, "json")
    storage.write(f"{_FOLDER}/{mine}", [record])
    if timer.clock() - started > _LATEST_PUT_S:
        # The mark first: a PUT that lands after the deletion must not come to life again.
        storage.write(f"{_FOLDER}/{_name(attempt, token, 'withdrawn')}", [b"too slow\n"])
        storage.delete(f"{_FOLDER}/{mine}")
        return False
    timer.sleep(_SETTLE_S)
    if path(storage, attempt) == f"{_FOLDER}/{mine}":
        return True
    storage.delete(f"{_FOLDER}/{mine}")
    return False


def shut_out_late_rivals(storage: Storage, attempt: int, token: str) -> None:
    """Withdraws, for its claimant, a lower token that landed after `token` had won its number.

    Its claimant is dead (its PUT was still on the way) or is about to withdraw it as too slow: one that
    counts had landed before the winner listed. Left there, it would fence off a healthy attempt for nobody.
    """
    found = [match for match in _matches(storage) if int(match[1]) == attempt]
    withdrawn = {match[2] for match in found if match[3] == "withdrawn"}
    for match in found:
        if match[3] == "json" and match[2] < token and match[2] not in withdrawn:
            storage.write(f"{_FOLDER}/{_name(attempt, match[2], 'withdrawn')}", [b"too late\n"])


def path(storage: Storage, attempt: int) -> str | None:
    """The record that holds a number: the lowest token that was not withdrawn; None for none."""
    found = [match for match in _matches(storage) if int(match[1]) == attempt]
    withdrawn = {match[2] for match in found if match[3] == "withdrawn"}
    tokens = [match[2] for match in found if match[3] == "json" and match[2] not in withdrawn]
    return f"{_FOLDER}/{_name(attempt, min(tokens), 'json')}" if tokens else None


def numbers(storage: Storage) -> set[int]:
    """All numbers that were ever claimed, withdrawn ones included: none is used twice."""
    return {int(match[1]) for match in _matches(storage)}


def _matches(storage: Storage) -> list[re.Match[str]]:
    found = (_NAME.fullmatch(name) for name in storage.list(_FOLDER))
    return [match for match in found if match]


def _name(attempt: int, token: str, kind: str) -> str:
    name = f"a{attempt:03d}.{token}.{kind}"
    assert _NAME.fullmatch(name), f"token {token!r} is not 32 hex digits"
    return name
