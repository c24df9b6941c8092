"""Which entries of `sys.path` belong to the Python installation; all others are the user's own."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Sequence


def installed_entries(path: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a path that are the standard library's and the site directories'. 2 us once it is known."""
    return _installed_entries(tuple(path))


@functools.lru_cache(maxsize=16)
def _installed_entries(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(entry for entry in path if _is_installed(os.path.abspath(entry)))


def _is_installed(path: str) -> bool:
    # those of another environment, through a path file of this one
    return os.path.basename(path) in ("site-packages", "dist-packages") or any(
        path == directory or path.startswith(directory + os.sep) for directory in _directories()
    )


@functools.cache
def _directories() -> tuple[str, ...]:
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    for prefix in (sys.base_prefix, sys.base_exec_prefix, sys.prefix):
        found |= {os.path.join(prefix, sys.platlibdir, archive), os.path.join(prefix, "lib", archive)}
    # where Debian's Python keeps what apt installs
    found.add("/usr/lib/python3/dist-packages")
    return tuple(sorted(os.path.abspath(path) for path in found if path))
