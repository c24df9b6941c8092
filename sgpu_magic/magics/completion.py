"""Completion of the magic's options, types and names."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.magics.arguments import UI_CHOICES, parser
from sgpu_magic.protocol.device_types import KNOWN_TYPES

_KEYS = ("%%distributed", "%distributed")
_VALUES = {"--type": ("any", "cpu", *KNOWN_TYPES), "--ui": UI_CHOICES, "--pool": ("local",)}
_NAMES = ("--in", "--out", "--exclude")


def install(shell: InteractiveShell) -> None:
    for key in _KEYS:
        shell.set_hook("complete_command", _complete, str_key=key)


def remove(shell: InteractiveShell) -> None:
    for key in _KEYS:
        shell.strdispatchers["complete_command"].strs.pop(key, None)


def _complete(shell: InteractiveShell, event: Any) -> list[str]:
    """Return what may stand at the cursor (`IPython.core.completer`'s event: line, symbol, text_until_cursor)."""
    words = event.text_until_cursor.split()
    if not event.text_until_cursor.endswith(" "):
        words = words[:-1]
    before = words[-1] if words else ""
    if before in _VALUES:
        return list(_VALUES[before])
    if before in _NAMES:
        return [name for name in shell.user_ns if not name.startswith("_")]
    return [option for action in parser()._actions for option in action.option_strings]  # pyright: ignore[reportPrivateUsage]
