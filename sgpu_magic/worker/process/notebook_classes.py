"""The notebook's classes and functions in child processes of a rank.

multiprocessing pickles them by reference to `__main__`, which spawn and forkserver children don't have: in a plain
notebook, a DataLoader over a Dataset defined there fails (pytorch#51344). Here they are pickled by value. These
children import this module, so it holds nothing else.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle


def teach_multiprocessing() -> None:
    """Make multiprocessing pickle classes and functions of `__main__` by value."""
    ForkingPickler.reducer_override = _reduce_by_value  # pyright: ignore[reportAttributeAccessIssue]


def load(data: bytes) -> object:
    """In the child, rebuild a class or function, and pickle such objects by value from then on."""
    teach_multiprocessing()
    return cloudpickle.loads(data)


def _reduce_by_value(self: ForkingPickler, obj: object) -> Any:
    if isinstance(obj, type | types.FunctionType) and getattr(obj, "__module__", None) == "__main__":
        # multiprocessing's pickler can't pickle code objects, so cloudpickle's stream is nested in its own
        return load, (cloudpickle.dumps(obj),)
    return NotImplemented
