"""The filters of warnings."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterable
from typing import Any

from sgpu_magic.system.process_settings.setting_group import SettingGroup, Values

# ipykernel's own filter, which concerns only its loop
_IPYKERNELS_FILTER = ".*Trio's signal handling code might have collided.*"
# those of Python and IPython, which a rank has as well
_USUAL_FILTERS = [
    ["error", None, "IPython.core.completer:ProvisionalCompleterWarning", None, 0],
    ["default", None, "builtins:DeprecationWarning", "__main__", 0],
    *(
        ["ignore", None, f"builtins:{name}", None, 0]
        for name in ("DeprecationWarning", "PendingDeprecationWarning", "ImportWarning", "ResourceWarning")
    ),
]


class Warnings(SettingGroup):
    """All filters as one list, because their order matters. A kernel that has only the usual ones has no setting."""

    name = module = "warnings"
    _key = "filters"

    def __init__(self) -> None:
        # the rank's filters before the notebook's were applied
        self._own: list[list[Any]] | None = None
        self._set: list[Any] = []

    def read(self, module: Any) -> Values:
        value = self.get(module, self._key)
        others = [each for each in value if each[1] != _IPYKERNELS_FILTER]
        return {} if others == _USUAL_FILTERS else {self._key: value}

    def get(self, module: Any, key: str) -> Any:
        return [each for each in map(self._described, list(module.filters)) if each is not None]

    def set(self, module: Any, key: str, value: Any) -> None:
        now = self.get(module, key)
        own = self._own = now if self._own is None else self._own
        # filters that the rank's code has added stay first
        added = [each for each in now if each not in own and each not in self._set]
        self._set = value
        rest = [each for each in own if each not in value]
        kept = [each for each in module.filters if self._described(each) is None]
        module.resetwarnings()
        for action, message, category, where, line in [*added, *value, *rest]:
            kind = self._category(category)
            if kind is not None:
                module.filterwarnings(action, message or "", kind, where or "", line, append=True)
        module.filters[:0] = kept
        with contextlib.suppress(AttributeError):
            module._filters_mutated()

    def owners(self, key: str, value: Any) -> Iterable[str]:
        return {category.partition(":")[0] for _, _, category, _, _ in value}

    def _described(self, entry: Any) -> list[Any] | None:
        action, message, category, where, line = entry
        home = getattr(category, "__module__", None)
        if not isinstance(home, str) or home == "__main__":
            return None
        texts = [getattr(each, "pattern", each) for each in (message, where)]
        return [action, texts[0], f"{home}:{category.__qualname__}", texts[1], line]

    def _category(self, name: str) -> Any:
        home, _, path = name.partition(":")
        try:
            return operator.attrgetter(path)(sys.modules[home])
        except (KeyError, AttributeError):
            # the module is not imported yet, or has another version
            return None
