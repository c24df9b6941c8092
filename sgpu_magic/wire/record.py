"""The base of every record and message, and the ids that they name: checked before a path is made of them."""

from __future__ import annotations

import re
import secrets

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the records: immutable, defaults left out on the wire."""


_ID = re.compile(r"[0-9a-f]{8}")
SHORT_LENGTH = 4


def new_id() -> str:
    """Return a fresh id: 8 hexadecimal digits."""
    return secrets.token_hex(4)


def is_valid_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(text: str) -> str:
    """Return `text` if it is an id.

    Raises:
        ValueError: It is not; ids become parts of paths, so nothing else may pass.
    """
    if not is_valid_id(text):
        raise ValueError(f"{text[:40]!r} is not a run id: 8 hexadecimal digits are")
    return text


def short(run_id: str) -> str:
    """The form a person sees: the first four digits, which every command accepts where they are unique."""
    return run_id[:SHORT_LENGTH]
