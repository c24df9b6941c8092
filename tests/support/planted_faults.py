"""An agent with faults planted in its callbacks: `python planted_faults.py ARMED FD`, else as `-m sgpu_magic.agent FD`.

The file ARMED holds `CALLBACK once RUN` or `CALLBACK always RUN`: the callback raises when it works for that run, or
for any if RUN is `-`. The fault removes the file when it strikes; with `always`, the test removes it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Planted(RuntimeError):
    """The fault."""


def arm(armed: Path, callback: str, run: str = "-", mode: str = "once") -> None:
    """Make a callback of the agent raise."""
    part = armed.with_suffix(".part")
    part.write_text(f"{callback} {mode} {run}")
    part.replace(armed)


def at(cls: type | None, function: Callable[..., Any]) -> str:
    """Return a callback's name: `module:Class.method`, or `module:function` without a class.

    Tests refer to callbacks as objects, so that a tool that renames one renames it here.
    """
    if cls is None:
        return f"{function.__module__}:{function.__name__}"
    # a method may be inherited; the fault is planted in this class
    return f"{cls.__module__}:{cls.__name__}.{function.__name__}"


def plant(armed: Path, callbacks: tuple[str, ...]) -> None:
    """Replace each callback, as named by `at`."""
    for callback in callbacks:
        module_name, _, path = callback.partition(":")
        *parents, name = path.split(".")
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, _planted(armed, callback, getattr(owner, name)))


def _planted(armed: Path, callback: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def with_fault(*args: Any, **kwargs: Any) -> Any:
        try:
            name, mode, run = armed.read_text().split()
        except FileNotFoundError:
            return plain(*args, **kwargs)
        if name == callback and (run == "-" or run in map(_run_of, args)):
            if mode == "once":
                armed.unlink()
            raise Planted(f"planted in {callback}")
        return plain(*args, **kwargs)

    return with_fault


def _run_of(part: Any, depth: int = 3) -> str:
    """Return the run that a part of the agent, or a message, belongs to; "" if it has none."""
    if isinstance(part, str):
        return part
    for name in ("run_id", "_run_id"):
        if isinstance(found := getattr(part, name, None), str):
            return found
    if depth:
        for name in (
            "launch",
            "_launch",
            "spec",
            "listener",
            "run_ranks",
            "_run_ranks",
            "group",
            "_group",
            "emit",
            "__self__",
        ):
            if (inner := getattr(part, name, None)) is not None and (found := _run_of(inner, depth - 1)):
                return found
    return ""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from planted_table import CALLBACKS

    from sgpu_magic.agent.__main__ import main

    sys.path.pop(0)
    plant(Path(sys.argv.pop(1)), CALLBACKS)
    main()
