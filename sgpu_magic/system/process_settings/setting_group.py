"""The settings of one module: how they are read and set, and how ranks treat them."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Values = dict[str, Any]
"""JSON values by key."""

UNREADABLE = (AttributeError, ImportError, KeyError, LookupError, RuntimeError, TypeError, ValueError)
"""Raised by a module that lacks a setting: it has another version, or is being imported."""


class SettingGroup:
    """The settings of one module.

    Attributes:
        name: Name of the group.
        module: The module; its settings are read once it is imported.
    """

    name = ""
    module = ""

    def read(self, module: Any) -> Values:
        """Return the values that differ from the defaults."""
        raise NotImplementedError

    def get(self, module: Any, key: str) -> Any:
        """Return one value, for `set`."""
        raise NotImplementedError

    def set(self, module: Any, key: str, value: Any) -> None:
        """Set one value."""
        raise NotImplementedError

    def is_set(self, current: Any, value: Any) -> bool:
        """Return whether a value that `get` returned equals one to set."""
        return current == value

    def waits_for(self, key: str, value: Any) -> str:
        """Return a module without which the setting has no effect, "" if it is set at once."""
        del key, value
        return ""

    def owners(self, key: str, value: Any) -> Iterable[str]:
        """Return modules whose import may change the setting, after which it is set again."""
        del key, value
        return ()

    def left_behind(self, module: Any) -> Iterable[str]:
        """Return descriptions of the module's settings that can't be sent."""
        del module
        return ()


class Setting(NamedTuple):
    """One setting with a getter and a setter.

    Args:
        get: Returns its value, given the module.
        set: Sets it, given the module and a value.
        default: The value that is not sent.
    """

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    default: Any


class SettingTable(SettingGroup):
    """A group whose settings are independent of each other."""

    def __init__(self, module: str, settings: Mapping[str, Setting]) -> None:
        self.name = self.module = module
        self.settings = settings

    def read(self, module: Any) -> Values:
        found: Values = {}
        for key, setting in self.settings.items():
            with contextlib.suppress(*UNREADABLE):
                value = setting.get(module)
                if value != setting.default:
                    found[key] = value
        return found

    def get(self, module: Any, key: str) -> Any:
        return self.settings[key].get(module)

    def set(self, module: Any, key: str, value: Any) -> None:
        self.settings[key].set(module, value)


def attribute_setting(path: str, default: Any) -> Setting:
    """Return the setting that is an attribute of the module, or of an object in it."""
    owner, _, name = path.rpartition(".")
    owner_of: Callable[[Any], Any] = operator.attrgetter(owner) if owner else lambda module: module
    return Setting(
        lambda module: getattr(owner_of(module), name),
        lambda module, value: setattr(owner_of(module), name, value),
        default,
    )


def call_setting(getter: str, setter: str, default: Any) -> Setting:
    """Return the setting that a function of the module returns and another one sets."""
    get, set_ = operator.attrgetter(getter), operator.attrgetter(setter)
    return Setting(lambda module: get(module)(), lambda module, value: set_(module)(value), default)
