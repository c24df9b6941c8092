"""The base of every record and message."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the records: immutable, defaults left out on the wire."""
