"""Reads the settings of the notebook's process."""

from __future__ import annotations

import contextlib
import json
import signal
import sys

from sgpu_magic.system.process_settings.groups import GROUPS
from sgpu_magic.system.process_settings.setting_group import UNREADABLE

_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")


def read_settings() -> dict[str, str]:
    """Return this process's settings that differ from the defaults, by group and key, as JSON."""
    found: dict[str, str] = {}
    for group in GROUPS:
        module = sys.modules.get(group.module)
        if module is None:
            continue
        with contextlib.suppress(*UNREADABLE):
            values = group.read(module)
            found.update((f"{group.name}/{key}", json.dumps(value)) for key, value in values.items())
    return found


def left_behind() -> list[str]:
    """Return descriptions of this process's settings that can't be sent to ranks."""
    found: list[str] = []
    for group in GROUPS:
        module = sys.modules.get(group.module)
        if module is not None:
            with contextlib.suppress(*UNREADABLE):
                found.extend(group.left_behind(module))
    for name in _SIGNALS:
        handler = signal.getsignal(getattr(signal, name))
        if getattr(handler, "__module__", None) == "__main__":
            found.append(f"the handler of {name}")
    return found
