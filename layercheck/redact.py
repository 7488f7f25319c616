"""[pure] Keeps keys and passwords out of what is written beside a run: who reads a store reads them too."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(^|[_\-.])(secret|password|passwd|passphrase|credentials?|api_?key|access_?key|private_?key|account_?key"
    r"|auth|token|sas|signature|sig)([_\-.](id|key|value|file))?$",
    re.IGNORECASE,
)
_SHORTEST = 8
"""A shorter value of the environment could be any word."""


def without_secrets(value: Any, environment: Mapping[str, str]) -> Any:
    """The same JSON value with secrets replaced by `HIDDEN`.

    Secret is: a text whose key says so (`hf_token`, `api_key`), user and password of a URI and the options of
    its query that say so, and whatever a variable of the environment holds whose name says so.
    """
    known = [text for name, text in environment.items() if _SECRET.search(name) and len(text) >= _SHORTEST]
    return _clean(value, sorted(known, key=len, reverse=True))


def _clean(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(inner, str) and inner and _SECRET.search(str(key))
            else _clean(inner, known)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean(inner, known) for inner in value]
    return _clean_text(value, known) if isinstance(value, str) else value


def _clean_text(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    return _clean_uri(text) if "://" in text else text


def _clean_uri(text: str) -> str:
    try:
        parts = urlsplit(text)
        options = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return text
    user, _, host = parts.netloc.rpartition("@")
    has_password = ":" in user  # `abfs://container@account` has none
    if not has_password and not any(_SECRET.search(name) for name, _ in options):
        return text
    place = f"{HIDDEN}@{host}" if has_password else parts.netloc
    query = urlencode(
        [(name, HIDDEN if _SECRET.search(name) else value) for name, value in options], safe="()"
    )
    return urlunsplit((parts.scheme, place, parts.path, query, parts.fragment))
