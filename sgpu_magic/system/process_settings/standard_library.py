"""The settings of the standard library: `decimal`, `locale`, `sys`, `gc`, `socket`, `multiprocessing` and `time`."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from sgpu_magic.system import collector
from sgpu_magic.system.process_settings.setting_group import (
    Setting,
    SettingTable,
    Values,
    attribute_setting,
    call_setting,
)

_GC_DEFAULTS = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0), (2000, 5, 10))
_DECIMAL = {
    "prec": 28, "rounding": "ROUND_HALF_EVEN", "Emin": -999999, "Emax": 999999, "capitals": 1, "clamp": 0,
    "traps": ["DivisionByZero", "InvalidOperation", "Overflow"],
}  # fmt: skip


def _decimal_context(decimal: Any) -> Values:
    context = decimal.getcontext()
    numbers = {name: getattr(context, name) for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")}
    return numbers | {"traps": sorted(signal_.__name__ for signal_, is_on in context.traps.items() if is_on)}


def _set_decimal_context(decimal: Any, value: Mapping[str, Any]) -> None:
    numbers = {name: each for name, each in value.items() if name != "traps"}
    decimal.setcontext(decimal.Context(**numbers, traps=[getattr(decimal, name) for name in value["traps"]]))


def _locale_setting(category: str) -> Setting:
    return Setting(
        lambda module: module.setlocale(getattr(module, category)),
        lambda module, value: module.setlocale(getattr(module, category), value),
        "C",
    )


def _set_start_method(multiprocessing: Any, method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)


class _OneOf:
    """Equal to each of several values."""

    def __init__(self, values: Collection[Any]) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        return other in self._values

    __hash__ = None  # pyright: ignore[reportAssignmentType]


STANDARD_LIBRARY: tuple[SettingTable, ...] = (
    SettingTable("decimal", {"context": Setting(_decimal_context, _set_decimal_context, _DECIMAL)}),
    SettingTable(
        "locale",
        {name: _locale_setting(name) for name in ("LC_NUMERIC", "LC_TIME", "LC_COLLATE", "LC_MONETARY", "LC_MESSAGES")},
    ),
    SettingTable(
        "sys",
        {
            "recursionlimit": call_setting("getrecursionlimit", "setrecursionlimit", default=1000),
            "int_max_str_digits": call_setting("get_int_max_str_digits", "set_int_max_str_digits", default=4300),
            "switchinterval": call_setting("getswitchinterval", "setswitchinterval", default=0.005),
            "dont_write_bytecode": attribute_setting("dont_write_bytecode", default=False),
        },
    ),
    SettingTable(
        "gc",
        {
            "threshold": Setting(
                lambda gc: list(gc.get_threshold()),
                lambda gc, value: gc.set_threshold(*value),
                _OneOf([list(each) for each in _GC_DEFAULTS]),
            ),
            "enabled": Setting(
                lambda gc: collector.is_enabled(), lambda gc, on: gc.enable() if on else gc.disable(), default=True
            ),
        },
    ),
    SettingTable("socket", {"defaulttimeout": call_setting("getdefaulttimeout", "setdefaulttimeout", default=None)}),
    SettingTable(
        "multiprocessing",
        {
            "start_method": Setting(
                lambda module: module.get_start_method(allow_none=True), _set_start_method, default=None
            )
        },
    ),
    SettingTable(
        "time",
        {
            "zone": Setting(
                lambda module: list(module.tzname) if "TZ" in os.environ else None,
                lambda module, _: module.tzset(),
                default=None,
            )
        },
    ),
)
