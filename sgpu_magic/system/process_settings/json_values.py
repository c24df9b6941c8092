"""Values of options as JSON values, and back."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

# the key of an option whose value is a string's method: `"{:.2f}".format`
_FORMAT = "str.format"


def to_json_value(value: Any) -> Any:
    """Return an option's value as a JSON value.

    Raises:
        TypeError: JSON has no type for it.
    """
    if getattr(value, "__name__", "") == "format" and isinstance(getattr(value, "__self__", None), str):
        return {_FORMAT: value.__self__}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    raise TypeError(f"a {type(value).__name__} can't be sent")


def from_json_value(value: Any) -> Any:
    """Return the option's value that `to_json_value` converted."""
    return value[_FORMAT].format if isinstance(value, dict) and _FORMAT in value else value
