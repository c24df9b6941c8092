"""Applies the notebook's settings to a rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sgpu_magic.system.process_settings.groups import GROUPS
from sgpu_magic.system.process_settings.setting_group import UNREADABLE, SettingGroup
from sgpu_magic.wire.decoding import load_json


class RankSettings:
    """Applies the notebook's settings to this process.

    A setting that the rank's code changes keeps its value until the notebook's value changes.

    Args:
        after_import: Calls a function with each of these modules after its import.
    """

    def __init__(self, after_import: Callable[[tuple[str, ...], Callable[[Any], None]], None]) -> None:
        self._after_import = after_import
        self._wanted: dict[str, str] = {}
        self._before: dict[str, Any] = {}
        self._awaited: set[str] = set()

    def follow(self, wanted: Mapping[str, str]) -> list[str]:
        """Apply the settings that have changed since the last call, also those that are at their defaults again.

        Returns:
            Sentences about settings that this process refused.
        """
        old, self._wanted = self._wanted, dict(wanted)
        changed = [key for key in {**old, **wanted} if old.get(key) != wanted.get(key)]
        return self._apply(changed)

    def _apply(self, changed: Iterable[str]) -> list[str]:
        problems: list[str] = []
        awaited: set[str] = set()
        found: list[tuple[str, SettingGroup, Any, str]] = []
        for full in changed:
            name, _, key = full.partition("/")
            # a setting of a newer version has no group
            for group in (group for group in GROUPS if group.name == name):
                module = sys.modules.get(group.module)
                if module is None:
                    awaited.add(group.module)
                else:
                    found.append((full, group, module, key))
        # read all values before setting any: one setting may change another
        for full, group, module, key in found:
            if full not in self._before:
                with contextlib.suppress(*UNREADABLE):
                    self._before[full] = group.get(module, key)
        for full, group, module, key in found:
            if full not in self._before:
                continue
            wanted = self._wanted.get(full)
            value = self._before[full] if wanted is None else load_json(wanted)
            waits_for = group.waits_for(key, value)
            try:
                if (not waits_for or waits_for in sys.modules) and not group.is_set(group.get(module, key), value):
                    group.set(module, key, value)
            except Exception as error:  # noqa: BLE001  setters of other packages run here
                problems.append(f"{full} of the notebook could not be set: {type(error).__name__}: {error}")
            if wanted is not None:
                awaited.update(each for each in group.owners(key, value) if each not in sys.modules)
        new = tuple(awaited - self._awaited)
        if new:
            self._awaited.update(new)
            self._after_import(new, self._imported)
        return problems

    def _imported(self, module: Any) -> None:
        """Apply the settings of a module that has just been imported, and those that its import may have changed."""
        name: str = module.__name__
        groups = {group.name: group for group in GROUPS}
        affected: list[str] = []
        for full, wanted in self._wanted.items():
            group = groups.get(full.partition("/")[0])
            key = full.partition("/")[2]
            if group is not None and (group.module == name or name in group.owners(key, load_json(wanted))):
                affected.append(full)
        self._apply(affected)
