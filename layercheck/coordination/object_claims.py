"""Claims on stores that cannot create a name exclusively: the record's name carries its claimant's token.

One claim, by one claimant:
1. list; if anybody holds this number, it is not ours. The clock of `_LATEST_PUT_S` runs from here.
2. PUT the record under its own name. A crash from here on leaves a claim that nobody uses, and its number.
3. slower than `_LATEST_PUT_S`? Then a rival may have counted without us: withdraw, try under another number.
4. wait `_SETTLE_S`, which is longer than any PUT that counts, and list again: the lowest token has won.
5. PUT a mark that says so. A lower token that lands later, when its claimant is dead or about to withdraw it,
   would otherwise take the number away from a healthy attempt for nobody.

What two clocks may disagree on decides nothing: each measures only its own seconds. Should two claimants win
all the same (a store whose lists lag), the higher token's commits are dead by lineage (I15).
"""

import re

from layercheck.coordination.timer import REAL_TIME, Timer
from layercheck.persistence.storage import Storage

_KINDS = ("json", "withdrawn", "won")
_NAME = re.compile(rf"a(\d{{3,}})\.([0-9a-f]{{32}})\.({'|'.join(_KINDS)})")
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
    return confirm(storage, attempt, token, timer)


def confirm(storage: Storage, attempt: int, token: str, timer: Timer = REAL_TIME) -> bool:
    """Steps 4 and 5, also for a claim whose maker died in them; False if somebody else holds the number."""
    mine = f"{_FOLDER}/{_name(attempt, token, 'json')}"
    won = _name(attempt, token, "won")
    if won in storage.list(_FOLDER):
        return path(storage, attempt) == mine
    timer.sleep(_SETTLE_S)
    if path(storage, attempt) != mine:
        storage.delete(mine)
        return False
    storage.write(f"{_FOLDER}/{won}", [b"won\n"])
    return True


def path(storage: Storage, attempt: int) -> str | None:
    """The record that holds a number: the lowest token of those that have won, else of all; None for none."""
    found = [match for match in _matches(storage) if int(match[1]) == attempt]
    by_kind = {kind: {match[2] for match in found if match[3] == kind} for kind in _KINDS}
    tokens = by_kind["json"] - by_kind["withdrawn"]
    tokens = tokens & by_kind["won"] or tokens
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
