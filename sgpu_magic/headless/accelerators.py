"""Databricks' names of what a job runs on."""

from __future__ import annotations

import re

from sgpu_magic.errors import UsageError
from sgpu_magic.protocol.device_types import canonical_type

_NAME = re.compile(r"GPU_([1-9][0-9]{0,3})x([A-Za-z0-9][A-Za-z0-9_-]*)", re.IGNORECASE)
_MOST = 4096


def read_accelerator(name: str, where: str) -> tuple[int, str]:
    """Read `GPU_8xH100`.

    Args:
        name: The text.
        where: What it was given for, for the refusal.

    Returns:
        How many of which type, canonical.

    Raises:
        UsageError: It is none of these names.
    """
    found = _NAME.fullmatch(name.strip())
    if found is None or int(found[1]) > _MOST:
        raise UsageError(
            f"{where}: {name!r} is no accelerator; write how many of which type, as in GPU_1xA10 or GPU_8xH100."
        )
    try:
        return int(found[1]), canonical_type(found[2])
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
