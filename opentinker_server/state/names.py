"""Names that users choose and ids that the server makes. Neither is ever used as a path before it is checked."""

from __future__ import annotations

import re
import secrets

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ID = re.compile(r"[asop]-[a-z2-7]{20}")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"

ADAPTER, SESSION, OPERATION, SAMPLER = "a", "s", "o", "p"


class NotAPlainName(ValueError):
    """A name is not a plain name."""


def new_id(kind: str) -> str:
    """A fresh random id, such as "a-..." for an adapter."""
    return f"{kind}-{''.join(secrets.choice(_ALPHABET) for _ in range(20))}"


def is_id(text: str, kind: str) -> bool:
    """Whether `text` has the form of an id of that kind."""
    return text.startswith(f"{kind}-") and _ID.fullmatch(text) is not None


def check_name(name: str, *, what: str) -> str:
    """`name` itself when it is a plain name. Raises NotAPlainName naming the rule."""
    if _PLAIN_NAME.fullmatch(name) is None or ".." in name:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise NotAPlainName(
            f"{what} {shown!r} is not a plain name: 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit, without '..'"
        )
    return name
