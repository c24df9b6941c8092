"""Classes of the notebook in child processes of a rank."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import operator
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any


def teach_multiprocessing() -> None:
    """Make multiprocessing pickle classes and functions of `__main__` by value."""
    ForkingPickler.reducer_override = _reduce_by_value  # pyright: ignore[reportAttributeAccessIssue]


def load(data: bytes) -> object:
    """In the child, rebuild a class or function, and pickle such objects by value from then on."""
    import cloudpickle

    teach_multiprocessing()
    return cloudpickle.loads(data)


def _reduce_by_value(self: ForkingPickler, obj: object) -> Any:
    if (
        isinstance(obj, type | types.FunctionType)
        and getattr(obj, "__module__", None) == "__main__"
        and not _is_imported(obj)
    ):
        import cloudpickle

        # multiprocessing's pickler can't pickle code objects, so cloudpickle's stream is nested in its own
        return load, (cloudpickle.dumps(obj),)
    return NotImplemented


def _is_imported(obj: type | types.FunctionType) -> bool:
    """Whether the child finds the object in the file that it imports for `__main__`."""
    main = sys.modules["__main__"]
    if not getattr(main, "__file__", None) or getattr(main, "__package__", None):
        # a cell; or a module of a package, whose relative imports fail in the child
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(main) is obj
    except AttributeError:
        return False
