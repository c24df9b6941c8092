"""Objects of `typing` that the notebook has made: NewType, ParamSpec, TypeVarTuple, and aliases of `type X = ...`.

They pickle themselves by reference to the module that made them, which for a notebook exists nowhere else. Here they
are pickled by value. Both sides know them by an id, as cloudpickle's classes, so that one that is sent twice, or comes
back, is the same object.
"""

# private names of typing and cloudpickle
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable
from typing import Any

_ALIAS: Any = getattr(typing, "TypeAliasType", None)
_NEW_TYPE: Any = typing.NewType
_PARAM_SPEC: Any = typing.ParamSpec
_KINDS = tuple(
    kind for kind in (typing.NewType, typing.ParamSpec, typing.TypeVarTuple, _ALIAS) if isinstance(kind, type)
)
_VARIANCE = ("covariant", "contravariant", "infer_variance")

Reduced = tuple[Any, ...]


def is_one(obj: object) -> bool:
    return isinstance(obj, _KINDS)


def reduce(obj: Any, tracker_id: str) -> Reduced:
    """Return the reduction by value of an object for which `is_one` is true.

    Args:
        obj: The object.
        tracker_id: Its id on both sides; "" for none.
    """
    if isinstance(obj, _NEW_TYPE):
        # its base may refer to it
        slots = {"__supertype__": obj.__supertype__, "__qualname__": obj.__qualname__}
        return make_new_type, (obj.__name__, obj.__module__, tracker_id), slots, None, None, set_slots
    if _ALIAS is not None and isinstance(obj, _ALIAS):
        if obj.__type_params__:
            return make_alias, (obj.__name__, obj.__module__, obj.__type_params__, (obj.__value__,), tracker_id)
        # its value may refer to it, so it follows the alias in the stream
        arguments = obj.__name__, obj.__module__, tracker_id
        return make_lazy_alias, arguments, (obj.__value__,), None, None, set_value
    options: dict[str, Any] = {}
    if isinstance(obj, _PARAM_SPEC):
        options = {name: getattr(obj, f"__{name}__") for name in _VARIANCE if getattr(obj, f"__{name}__", False)}
        if obj.__bound__ is not None:
            options["bound"] = obj.__bound__
    if getattr(obj, "has_default", bool)():
        options["default"] = obj.__default__
    return make_parameter, (type(obj).__name__, obj.__name__, obj.__module__, options, tracker_id)


# ---------------------------------------------------------------- called by pickle streams


def make_new_type(name: str, module: str, tracker_id: str) -> object:
    return _known_object(tracker_id, lambda: _NEW_TYPE(name, object), module)


def set_slots(obj: object, slots: dict[str, object]) -> None:
    for name, value in slots.items():
        setattr(obj, name, value)


def make_parameter(kind: str, name: str, module: str, options: dict[str, Any], tracker_id: str) -> object:
    return _known_object(tracker_id, lambda: getattr(typing, kind)(name, **options), module)


def make_alias(name: str, module: str, parameters: Any, value: tuple[object], tracker_id: str) -> object:
    return _known_object(tracker_id, lambda: _ALIAS(name, value[0], type_params=parameters), module)


# values that follow aliases in the stream that is being read, by the id of the alias
_awaited: dict[int, list[object]] = {}


def make_lazy_alias(name: str, module: str, tracker_id: str) -> object:
    """Return an alias whose value `set_value` sets. Only the statement makes one that computes its value when read."""
    value: list[object] = []
    namespace: dict[str, Any] = {"__name__": module, "value": value}
    exec(f"type {name} = value[0]", namespace)
    alias = _known_object(tracker_id, lambda: namespace[name], module)
    _awaited[id(alias)] = value
    return alias


def set_value(alias: object, value: tuple[object]) -> None:
    _awaited.pop(id(alias)).append(value[0])


def _known_object(tracker_id: str, make: Callable[[], Any], module: str) -> object:
    """Return the object that this process knows by this id, or a new one."""
    cloudpickle: Any = importlib.import_module("cloudpickle.cloudpickle")
    found = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id) if tracker_id else None
    if found is not None:
        return found
    made = make()
    try:
        made.__module__ = module
    except AttributeError:
        # `__module__` of an alias is read-only
        return made
    return cloudpickle._lookup_class_or_track(tracker_id, made) if tracker_id else made
