"""The base of every record and message, and run ids, which are validated before they become parts of paths."""

from __future__ import annotations

import re
import secrets

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the records: immutable; fields with their default value are not sent."""


_ID = re.compile(r"[0-9a-f]{8}")
SHORT_LENGTH = 4


def new_id() -> str:
    """Return a new id: 8 hexadecimal digits."""
    return secrets.token_hex(4)


def is_valid_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(text: str) -> str:
    """Return `text` if it is an id.

    Raises:
        ValueError: It is not. Ids become parts of paths, so nothing else is accepted.
    """
    if not is_valid_id(text):
        raise ValueError(f"{text[:40]!r} is not a run id (8 hexadecimal digits)")
    return text


def short(run_id: str) -> str:
    """Return the first four digits of a run's id, as displayed. Commands accept them if they are unique."""
    return run_id[:SHORT_LENGTH]
