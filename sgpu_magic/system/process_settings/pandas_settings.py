"""The settings of pandas: the options of `pandas.set_option`."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from sgpu_magic.system.process_settings.json_values import from_json_value, to_json_value
from sgpu_magic.system.process_settings.setting_group import SettingGroup, Values


class Pandas(SettingGroup):
    """The options of `pandas.set_option`."""

    name = module = "pandas"

    def _options(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the options that are not at their defaults."""
        config: Any = sys.modules["pandas._config.config"]
        for key, option in config._registered_options.items():
            if key in config._deprecated_options:
                # reading a deprecated option warns
                continue
            value: Any = config._global_config
            for part in key.split("."):
                value = value[part]
            if value is not option.defval and value != option.defval:
                yield key, value

    def read(self, module: Any) -> Values:
        found: Values = {}
        for key, value in self._options(module):
            with contextlib.suppress(TypeError):
                found[key] = to_json_value(value)
        return found

    def get(self, module: Any, key: str) -> Any:
        return to_json_value(module.get_option(key))

    def set(self, module: Any, key: str, value: Any) -> None:
        module.set_option(key, from_json_value(value))

    def left_behind(self, module: Any) -> Iterator[str]:
        for key, value in self._options(module):
            try:
                to_json_value(value)
            except TypeError:
                yield f"the function in pandas' {key}"
