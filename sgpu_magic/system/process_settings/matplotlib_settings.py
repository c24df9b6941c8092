"""The settings of matplotlib: `rcParams`."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import sys
from typing import Any

from sgpu_magic.system.process_settings.json_values import to_json_value
from sgpu_magic.system.process_settings.setting_group import SettingGroup, Values

_CYCLER = "cycler"
# options of figure windows, which a rank does not have
_WINDOW_OPTIONS = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")


class Matplotlib(SettingGroup):
    """`rcParams`, as a style sets them."""

    name = module = "matplotlib"

    def read(self, module: Any) -> Values:
        found: Values = {}
        defaults = module.rcParamsDefault
        for key, value in dict.items(module.rcParams):
            default = dict.get(defaults, key)
            if value is default or value == default or key in _WINDOW_OPTIONS or key.startswith("webagg"):
                continue
            with contextlib.suppress(TypeError):
                found[key] = _to_json_value(value)
        return found

    def get(self, module: Any, key: str) -> Any:
        return _to_json_value(module.rcParams[key])

    def set(self, module: Any, key: str, value: Any) -> None:
        if isinstance(value, dict) and _CYCLER in value:
            value = sys.modules["cycler"].cycler(**value[_CYCLER])
        module.rcParams[key] = value


def _to_json_value(value: Any) -> Any:
    # a `Cycler`, as in the option `axes.prop_cycle`
    return {_CYCLER: value.by_key()} if hasattr(value, "by_key") else to_json_value(value)
