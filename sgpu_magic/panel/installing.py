"""Packages are installed into the kernel's own environment, and removed from it, as the panel asks."""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Sequence

from sgpu_magic.config import Settings
from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.uv_command import Done, call_pip, call_uv, index_variables, last_words

INSTALL_S = 1800.0

_WOULD = re.compile(r"^Would install (\d+) package", re.MULTILINE)
_COMES = re.compile(r"^ \+ (\S+)==(\S+)", re.MULTILINE)


def install(settings: Settings, added: Sequence[str], removed: Sequence[str]) -> None:
    """Install and uninstall; the kernel finds what is new at its next import.

    Args:
        settings: With the package index.
        added: Requirements.
        removed: Names.

    Raises:
        EnvironmentFailed: It can't be done; the message has the installer's reason.
    """
    if added:
        _check(_installer(settings, ["install", *_after_options(added)]), f"{', '.join(added)} can't be installed")
    if removed:
        flags = [] if _takes_uv() else ["-y"]
        done = _installer(settings, ["uninstall", *flags, *_after_options(removed)])
        _check(done, f"{', '.join(removed)} can't be removed")
    importlib.invalidate_caches()


def would_install(settings: Settings, added: Sequence[str], timeout_s: float) -> tuple[str, ...]:
    """Return what comes when these are installed, `peft 0.17.1`; nothing is changed.

    Raises:
        TimeoutError: It takes longer.
        EnvironmentFailed: They can't be installed.
    """
    options = [*_uv_place(), "--dry-run"]
    try:
        done = call_uv(
            ["pip", "install", *options, *_after_options(added)], index_variables(settings.index_url), timeout_s
        )
    except EnvironmentFailed as error:
        raise TimeoutError(error.message) from error
    _check(done, f"{', '.join(added)} can't be installed")
    coming = tuple(f"{name} {version}" for name, version in _COMES.findall(done.words))
    told = _WOULD.search(done.words)
    return coming or ("",) * (int(told[1]) if told is not None else 0)


def _installer(settings: Settings, arguments: Sequence[str]) -> Done:
    if _takes_uv():
        command, *rest = arguments
        return call_uv(["pip", command, *_uv_place(), *rest], index_variables(settings.index_url), INSTALL_S)
    variables = {"PIP_INDEX_URL": settings.index_url} if settings.index_url else {}
    return call_pip(arguments, variables, INSTALL_S)


def _takes_uv() -> bool:
    """Whether this Python runs in a virtual environment that can be written; elsewhere pip knows what to do."""
    return sys.prefix != sys.base_prefix and os.access(sysconfig.get_path("purelib"), os.W_OK)


def _uv_place() -> list[str]:
    return ["--python", sys.executable]


def _after_options(words: Sequence[str]) -> list[str]:
    """What was checked to be no option is not to be read as one all the same."""
    return ["--", *words]


def _check(done: Done, what: str) -> None:
    if done.status:
        words = last_words(done.words) or last_words(done.output) or f"the installer ended as {done.status}"
        raise EnvironmentFailed(f"{what}: {words.rstrip('.')}.")
