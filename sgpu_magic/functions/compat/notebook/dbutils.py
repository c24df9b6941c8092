"""The base class of `dbutils` and its parts, and the parts that give a notebook values: `widgets` and `secrets`."""

# ipywidgets is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from sgpu_magic.errors import UsageError

_SEPARATOR = ","

# The variable of the key `hf-token` in the scope `team` is `SGPU_SECRET_TEAM__HF_TOKEN`: scope and key in capitals,
# with an underscore for every character that is not a letter or digit, and two between them.
_PREFIX = "SGPU_SECRET_"
_BETWEEN = "__"


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
    parameters = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in known]
    return f"({', '.join(parameters)})"


# ---------------------------------------------------------------- `dbutils.widgets`

# A parameter of `sgpu run` takes precedence over the displayed widget; without either, the default is used.
# All values are text, as Databricks documents.

Show = Callable[[Any], None]


class _Widget(NamedTuple):
    """One widget.

    Args:
        kind: `text`, `dropdown`, `combobox` or `multiselect`.
        default: Its first value as text.
        choices: What can be chosen; empty for `text`.
        control: The ipywidgets control that shows it; None where nothing is shown.
    """

    kind: str
    default: str
    choices: tuple[str, ...]
    control: Any

    @property
    def value(self) -> str:
        value: Any = self.default if self.control is None else self.control.value
        return value if isinstance(value, str) else _SEPARATOR.join(value)


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
        if widget is not None and widget.control is not None:
            widget.control.close()

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
            # a cell that runs again keeps the user's choice
            if before.control is not None and self._show is not None:
                self._show(before.control)
            return
        self.remove(name)
        control = None if self._show is None else _control(kind, label or name, value, possible)
        self._widgets[name] = _Widget(kind, value, possible, control)
        if self._show is not None:
            self._show(control)


def _control(kind: str, label: str, value: str, choices: tuple[str, ...]) -> Any:
    # imported here: only needed for displayed widgets, which `sgpu run` does not have
    import ipywidgets

    given: dict[str, Any] = {"description": label, "style": {"description_width": "initial"}}
    if kind == "text":
        return ipywidgets.Text(value=value, **given)
    if kind == "multiselect":
        chosen = tuple(part for part in value.split(_SEPARATOR) if part)
        return ipywidgets.SelectMultiple(options=choices, value=chosen, **given)
    made = ipywidgets.Dropdown if kind == "dropdown" else ipywidgets.Combobox
    return made(options=choices, value=value, **given)


# ---------------------------------------------------------------- `dbutils.secrets`


class SecretScope(NamedTuple):
    """A scope, as `dbutils.secrets.listScopes` returns it."""

    name: str


class SecretMetadata(NamedTuple):
    """A key of a scope, as `dbutils.secrets.list` returns it."""

    key: str


Keys = list[SecretMetadata]
Scopes = list[SecretScope]


class Secrets(Utility):
    """Secrets from variables SGPU_SECRET_SCOPE__KEY, or from the system's keyring if `keyring` is installed."""

    path = "dbutils.secrets"

    def get(self, scope: str, key: str) -> str:
        """Return a secret."""
        variable = variable_of(scope, key)
        value = os.environ[variable] if variable in os.environ else _from_keyring(scope, key)
        if value is None:
            raise UsageError(
                f"there is no secret {key!r} in the scope {scope!r}. Set the variable {variable} before the kernel "
                f"starts, or store it with `keyring set {scope} {key}`."
            )
        return value

    def getBytes(self, scope: str, key: str) -> bytes:
        """Return a secret as bytes."""
        return self.get(scope, key).encode()

    def list(self, scope: str) -> Keys:
        """Return the keys of a scope that variables hold, in lower case. A keyring can't be listed."""
        prefix = f"{_PREFIX}{_word(scope)}{_BETWEEN}"
        found = sorted(name.removeprefix(prefix) for name in os.environ if name.startswith(prefix))
        return [SecretMetadata(name.lower()) for name in found if name]

    def listScopes(self) -> Scopes:
        """Return the scopes that variables hold, in lower case."""
        parts = (name.removeprefix(_PREFIX).partition(_BETWEEN) for name in os.environ if name.startswith(_PREFIX))
        return [SecretScope(name) for name in sorted({scope.lower() for scope, _, key in parts if key})]


def variable_of(scope: str, key: str) -> str:
    """Return the name of the environment variable for a secret."""
    return f"{_PREFIX}{_word(scope)}{_BETWEEN}{_word(key)}"


def _word(text: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", text.upper())


def _from_keyring(scope: str, key: str) -> str | None:
    if importlib.util.find_spec("keyring") is None:
        return None
    keyring: Any = importlib.import_module("keyring")
    try:
        return keyring.get_password(scope, key)
    except keyring.errors.KeyringError as error:
        # a locked keyring, or none on this machine
        raise UsageError(f"the keyring can't be read: {error}. Set {variable_of(scope, key)} instead.") from None
