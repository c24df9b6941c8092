"""`dbutils.widgets`: values that a person sets in the notebook, or `sgpu run -p`.

A parameter of `sgpu run` takes precedence over what the notebook shows; the default is used where there is neither.
All values are text, as Databricks documents.
"""

# ipywidgets is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook.utility import Utility

Show = Callable[[Any], None]
_SEPARATOR = ","


class _Widget:
    """One widget.

    Args:
        kind: `text`, `dropdown`, `combobox` or `multiselect`.
        value: Its value as text.
        choices: What can be chosen; empty for `text`.
        control: The ipywidgets control that shows it; None where nothing is shown.
    """

    def __init__(self, kind: str, value: str, choices: tuple[str, ...], control: Any) -> None:
        self.kind = kind
        self.choices = choices
        self.control = control
        self._value = value

    @property
    def value(self) -> str:
        if self.control is None:
            return self._value
        shown: Any = self.control.value
        return shown if isinstance(shown, str) else _SEPARATOR.join(shown)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()


class Widgets(Utility):
    """Parameters of the notebook: shown as controls, and set by `sgpu run -p NAME=VALUE`.

    Args:
        parameters: The parameters of the job.
        show: Displays a control below the cell; None where no front end can draw it.
    """

    path = "dbutils.widgets"

    def __init__(self, parameters: Mapping[str, str], show: Show | None) -> None:
        self._parameters = dict(parameters)
        self._show = show
        self._widgets: dict[str, _Widget] = {}

    def text(self, name: str, defaultValue: str, label: str = "") -> None:
        """Create a text field."""
        self._create("text", name, defaultValue, (), label)

    def dropdown(self, name: str, defaultValue: str, choices: Sequence[str], label: str = "") -> None:
        """Create a list from which one value is chosen."""
        self._create("dropdown", name, defaultValue, choices, label)

    def combobox(self, name: str, defaultValue: str, choices: Sequence[str], label: str = "") -> None:
        """Create a text field with suggestions."""
        self._create("combobox", name, defaultValue, choices, label)

    def multiselect(self, name: str, defaultValue: str, choices: Sequence[str], label: str = "") -> None:
        """Create a list from which several values are chosen; the value joins them with commas."""
        self._create("multiselect", name, defaultValue, choices, label)

    def get(self, name: str) -> str:
        """Return the value of a widget or parameter as text."""
        if name in self._parameters:
            return self._parameters[name]
        if name in self._widgets:
            return self._widgets[name].value
        known = ", ".join(sorted({*self._widgets, *self._parameters})) or "none"
        raise UsageError(
            f"the notebook has no widget {name!r}. It has: {known}. Create it with dbutils.widgets.text({name!r}, "
            f"'DEFAULT'), or give a value with `sgpu run -p {name}=VALUE`."
        )

    def getArgument(self, name: str, defaultValue: str | None = None) -> str:
        """Return the value of a widget or parameter, or the default if there is none."""
        if defaultValue is not None and name not in self._parameters and name not in self._widgets:
            return str(defaultValue)
        return self.get(name)

    def getAll(self) -> dict[str, str]:
        """Return all values by name."""
        return {name: self.get(name) for name in {**self._widgets, **self._parameters}}

    def remove(self, name: str) -> None:
        """Remove a widget."""
        widget = self._widgets.pop(name, None)
        if widget is not None:
            widget.close()

    def removeAll(self) -> None:
        """Remove all widgets."""
        for name in list(self._widgets):
            self.remove(name)

    @contextlib.contextmanager
    def _bound(self, arguments: Mapping[str, str]) -> Generator[None]:
        """Set values, as of parameters, while another notebook runs."""
        before = self._parameters
        self._parameters = {**before, **arguments}
        try:
            yield
        finally:
            self._parameters = before

    def _create(self, kind: str, name: str, default: str, choices: Sequence[str], label: str) -> None:
        value, possible = str(default), tuple(map(str, choices))
        chosen = [part for part in value.split(_SEPARATOR) if part] if kind == "multiselect" else [value]
        wrong = [part for part in chosen if part not in possible]
        if kind in ("dropdown", "multiselect") and wrong:
            raise UsageError(
                f"the default {wrong[0]!r} of the widget {name!r} is not among its choices: {', '.join(possible)}."
            )
        before = self._widgets.get(name)
        if before is not None and (before.kind, before.choices) == (kind, possible):
            # a cell that runs again keeps what a person has chosen
            if before.control is not None and self._show is not None:
                self._show(before.control)
            return
        self.remove(name)
        control = None if self._show is None else _control(kind, label or name, value, possible)
        self._widgets[name] = _Widget(kind, value, possible, control)
        if self._show is not None:
            self._show(control)


def _control(kind: str, label: str, value: str, choices: tuple[str, ...]) -> Any:
    # needed here only, and not at all by `sgpu run`
    import ipywidgets

    given: dict[str, Any] = {"description": label, "style": {"description_width": "initial"}}
    match kind:
        case "dropdown":
            return ipywidgets.Dropdown(options=choices, value=value, **given)
        case "combobox":
            return ipywidgets.Combobox(options=choices, value=value, **given)
        case "multiselect":
            chosen = tuple(part for part in value.split(_SEPARATOR) if part)
            return ipywidgets.SelectMultiple(options=choices, value=chosen, **given)
        case _:
            return ipywidgets.Text(value=value, **given)
