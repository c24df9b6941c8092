"""An agent with faults planted in its callbacks: `python planted_faults.py ARMED FD`, else as `-m sgpu_magic.agent FD`.

The file ARMED contains `CALLBACK once RUN` or `CALLBACK always RUN`: the callback raises when it works for that run, or
for any run if RUN is `-`. With `once`, the fault removes the file when it is raised; with `always`, the test does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

PACKAGE = "sgpu_magic"
# the most attributes to follow from a callback's argument to the run that it works for
_STEPS_TO_RUN = 3


class Planted(RuntimeError):
    """The fault."""


@dataclass(frozen=True, slots=True)
class Callback:
    """A public function in which a fault is planted, and the calls that raise.

    Args:
        function: A method, a property's getter or a function of a module.
        message: The type of the message that these calls get; None for all calls.
        after: Whether the fault is raised after the call has done its work, instead of before it begins.
    """

    function: FunctionType
    message: type | None = None
    after: bool = False

    def __str__(self) -> str:
        when = "after:" if self.after else ""
        message = "" if self.message is None else f"({self.message.__name__})"
        return f"{when}{self.function.__module__}:{self.function.__qualname__}{message}"

    def is_of(self, parts: Iterable[object]) -> bool:
        """Whether a call with these arguments is one of those that raise."""
        message = self.message
        return message is None or any(isinstance(part, message) for part in parts)


def at(function: Callable[..., Any] | property, message: type | None = None, *, after: bool = False) -> Callback:
    """Return a callback for the table of faults; arguments as in `Callback`. A property stands for its getter."""
    getter = function.fget if isinstance(function, property) else function
    return Callback(cast("FunctionType", getter), message, after)


def arm(armed: Path, callback: Callback, run: str = "-", mode: str = "once") -> None:
    """Make a callback of the agent raise."""
    part = armed.with_suffix(".part")
    part.write_text(f"{callback} {mode} {run}")
    part.replace(armed)


def plant(armed: Path, callbacks: Iterable[Callback]) -> None:
    """Have the callbacks raise when they are armed."""
    of_functions: dict[FunctionType, list[Callback]] = {}
    for callback in callbacks:
        of_functions.setdefault(callback.function, []).append(callback)
    for function, planted in of_functions.items():
        _replace(function, _with_faults(armed, planted, function))


def _replace(function: FunctionType, replacement: Callable[..., Any]) -> None:
    """Replace a function in its class, or in every module that has it."""
    *classes, name = function.__qualname__.split(".")
    if not classes:
        for module in [module for key, module in sys.modules.items() if key.startswith(PACKAGE)]:
            if vars(module).get(name) is function:
                setattr(module, name, replacement)
        return
    owner: Any = sys.modules[function.__module__]
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, name, property(replacement) if isinstance(vars(owner)[name], property) else replacement)


def _with_faults(armed: Path, callbacks: list[Callback], plain: FunctionType) -> Callable[..., Any]:
    named = {str(callback): callback for callback in callbacks}

    @functools.wraps(plain)
    def with_faults(*args: Any, **kwargs: Any) -> Any:
        try:
            name, mode, run = armed.read_text().split()
        except FileNotFoundError:
            return plain(*args, **kwargs)
        callback, parts = named.get(name), (*args, *kwargs.values())
        if callback is None or not callback.is_of(parts) or (run != "-" and run not in map(_run_of, parts)):
            return plain(*args, **kwargs)
        if mode == "once":
            armed.unlink()
        if callback.after:
            plain(*args, **kwargs)
        raise Planted(f"planted in {callback}")

    return with_faults


def _run_of(part: object) -> str:
    """Return the run that a part of the agent, or a message, belongs to; "" if it has none."""
    if isinstance(part, str):
        return part
    parts = [part]
    for _ in range(_STEPS_TO_RUN + 1):
        for each in parts:
            if isinstance(run_id := getattr(each, "run_id", None), str):
                return run_id
        parts = [inner for each in parts for inner in _parts_of(each)]
    return ""


def _parts_of(part: object) -> Iterator[object]:
    """Yield the parts of the package to which an object refers by its attributes."""
    if isinstance(part, MethodType):
        yield part.__self__
    names = (*getattr(part, "__dict__", ()), *getattr(part, "__struct_fields__", ()))
    for inner in (getattr(part, name) for name in names):
        if isinstance(inner, MethodType) or type(inner).__module__.startswith(PACKAGE):
            yield inner


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    # the table's callbacks are of this module as it imports it
    import planted_faults
    from planted_table import CALLBACKS

    from sgpu_magic.agent.__main__ import main

    sys.path.pop(0)
    planted_faults.plant(Path(sys.argv.pop(1)), CALLBACKS)
    main()
