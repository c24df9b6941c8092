"""What an environment is known by."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

_VALID = re.compile(r"[0-9a-f]{16,64}")
_VERSION = "environment 1"


def environment_digest(
    parts: Iterable[str], python: str, platform: str, *, torch_mine: bool = False, allow_build: bool = False
) -> str:
    """Digest packages and how they are to be had.

    Args:
        parts: Pins and hashes; their order does not matter.
        python: The interpreter's tag, `cp311`.
        platform: `linux_x86_64`.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in (_VERSION, python, platform, f"{torch_mine=}", f"{allow_build=}", *sorted(parts)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def is_valid_digest(text: str) -> bool:
    """Whether it can be one, and so a file's name."""
    return _VALID.fullmatch(text) is not None
