"""The digest of a set of distributions, by which environments are known."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable

_VALID = re.compile(r"[0-9a-f]{16,64}")
_VERSION = "environment 1"


def own_python() -> str:
    """Return this Python's version without the patch number, `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def own_platform() -> str:
    """Return this platform's name, `linux_x86_64`."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def environment_digest(
    parts: Iterable[str], python: str, platform: str, *, torch_mine: bool = False, allow_build: bool = False
) -> str:
    """Digest a set of packages and the options for installing them.

    Args:
        parts: Pins and hashes, in any order.
        python: Interpreter tag, `cp311`.
        platform: Platform, `linux_x86_64`.
        torch_mine: Whether `--torch mine` is set.
        allow_build: Whether `--allow-build` is set.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in (_VERSION, python, platform, f"{torch_mine=}", f"{allow_build=}", *sorted(parts)):
        digest.update(os.fsencode(part) + b"\0")
    return digest.hexdigest()[:32]


def is_valid_digest(text: str) -> bool:
    """Whether a text has the form of a digest, and so is safe as a file name."""
    return _VALID.fullmatch(text) is not None
