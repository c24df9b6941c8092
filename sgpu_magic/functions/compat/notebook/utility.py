"""Base class of `dbutils` and its parts: help, unknown names, and why they stay in the notebook."""

from __future__ import annotations

import inspect
from typing import NoReturn


class Utility:
    """A part of `dbutils`.

    Attributes:
        path: Its name in a notebook, such as `dbutils.fs`.
        only_in_notebook: Why it can't be sent to the ranks.
    """

    path = "dbutils"
    only_in_notebook = (
        "dbutils is an object of the notebook's own process. Read what you need from it in a cell without "
        "%%distributed, as in `lr = float(dbutils.widgets.get('lr'))`, and use that variable on the ranks."
    )

    def help(self, name: str = "") -> None:
        """Print what is here, or what one function does."""
        print(self._help_on(name) if name else self._overview())  # noqa: T201

    def _overview(self) -> str:
        head = inspect.cleandoc(type(self).__doc__ or "").partition("\n")[0]
        lines = [f"{self.path}: {head}", ""]
        for name in self._names():
            member: object = getattr(self, name)
            line = inspect.cleandoc(member.__doc__ or "").partition("\n")[0]
            lines.append(f"  {name}{_parameters(member)}: {line}")
        return "\n".join(lines)

    def _help_on(self, name: str) -> str:
        member: object = getattr(self, name)
        return f"{self.path}.{name}{_parameters(member)}\n\n{inspect.getdoc(member)}"

    def _names(self) -> list[str]:
        own = [name for name, value in vars(type(self)).items() if callable(value)]
        parts = [name for name, value in vars(self).items() if isinstance(value, Utility)]
        return [name for name in (*parts, *own) if not name.startswith("_")]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self.path} has no {name!r} here. It has: {', '.join(self._names())}.")

    def __repr__(self) -> str:
        return f"{self.path}: {self.path}.help() lists what it has"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(self.only_in_notebook)


def _parameters(member: object) -> str:
    """Return a method's parameters with their defaults, "" for a part of `dbutils`."""
    if not inspect.ismethod(member):
        return ""
    known = inspect.signature(member).parameters.values()
    shown = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in known]
    return f"({', '.join(shown)})"
