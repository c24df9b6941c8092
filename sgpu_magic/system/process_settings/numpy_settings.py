"""The settings of numpy: print options, and the handling of floating-point errors."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgpu_magic.system.process_settings.setting_group import SettingGroup, Values

_NUMPY_PRINT = {
    "precision": 8, "threshold": 1000, "edgeitems": 3, "linewidth": 75, "suppress": False, "nanstr": "nan",
    "infstr": "inf", "sign": "-", "floatmode": "maxprec", "legacy": False,
}  # fmt: skip
_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
# modes that call a function, which can't be sent
_WITH_FUNCTION = ("call", "log")


class Numpy(SettingGroup):
    """Print options, and the handling of floating-point errors."""

    name = module = "numpy"

    def read(self, module: Any) -> Values:
        printed = module.get_printoptions()
        found = {key: printed[key] for key, default in _NUMPY_PRINT.items() if printed.get(key, default) != default}
        errors = module.geterr()
        for key, default in _NUMPY_ERRORS.items():
            if errors[key] != default and errors[key] not in _WITH_FUNCTION:
                found[key] = errors[key]
        return found

    def get(self, module: Any, key: str) -> Any:
        return (module.geterr() if key in _NUMPY_ERRORS else module.get_printoptions())[key]

    def set(self, module: Any, key: str, value: Any) -> None:
        (module.seterr if key in _NUMPY_ERRORS else module.set_printoptions)(**{key: value})

    def left_behind(self, module: Any) -> Iterator[str]:
        if module.get_printoptions().get("formatter"):
            yield "numpy's print formatter"
        if not set(_WITH_FUNCTION).isdisjoint(module.geterr().values()):
            yield "numpy's error handler"
