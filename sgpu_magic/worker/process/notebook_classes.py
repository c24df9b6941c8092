"""Classes and functions of the notebook in child processes of a rank.

multiprocessing pickles them by reference to `__main__`, which a spawned or forkserver child does not have: a
DataLoader over a notebook's Dataset fails in every notebook (pytorch#51344). Here they are pickled by value. Such a
child imports this module, and so nothing else stands in it.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle


def teach_multiprocessing() -> None:
    """Make multiprocessing's pickler send what `__main__` defines by value."""
    ForkingPickler.reducer_override = _reduce_by_value  # pyright: ignore[reportAttributeAccessIssue]


def load(data: bytes) -> object:
    """In the child: rebuild a class or function, and send such things back by value too."""
    teach_multiprocessing()
    return cloudpickle.loads(data)


def _reduce_by_value(self: ForkingPickler, obj: object) -> Any:
    if isinstance(obj, type | types.FunctionType) and getattr(obj, "__module__", None) == "__main__":
        # multiprocessing's pickler can't take code objects, so cloudpickle's stream lies within its own
        return load, (cloudpickle.dumps(obj),)
    return NotImplemented
