"""Records what the execution of each module imports, reads and changes, so that its import can be repeated later.

While a recorder records, each module that is executed gets a `RecordedImport`. Some changes are only recorded:
functions for `atexit` are not registered, and warnings are not shown.
"""

# the import system's own functions have no types
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any, cast

import msgspec

_BOOTSTRAP: Any = vars(importlib)["_bootstrap"]
_MISSING = object()


class ExitFunction(msgspec.Struct, frozen=True):
    """A call of `atexit.register`.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Effects(msgspec.Struct, eq=False):
    """What a part of one module's execution, between two of its imports, has read and changed of the process.

    Args:
        module: The module's name.
        reads: Values of the environment variables that it read, None for unset; without what it had set itself.
        environ: Environment variables: their values before and after, None for unset.
        finders: New entries of `sys.meta_path`, and whether each is the first entry.
        filters: New warning filters, the first one first.
        warnings: Warnings that it issued.
        exit_functions: What it registered with `atexit`.
        loggers: Names of loggers that it created.
    """

    module: str
    reads: dict[str, str | None] = {}
    environ: dict[str, tuple[str | None, str | None]] = {}
    finders: list[tuple[Any, bool]] = []
    filters: list[Any] = []
    warnings: list[warnings.WarningMessage] = []
    exit_functions: list[ExitFunction] = []
    loggers: list[str] = []


class RecordedImport(msgspec.Struct, eq=False):
    """One module's execution.

    Args:
        name: The module's name.
        steps: What it did, in order: imports, each by the name of the module, and what it read and changed.
        requests: Modules that it imported, also those that were loaded before.
        binding: If it was imported after its package had been executed: whether the package had an attribute of its
            name before, and that attribute's value. None if the package's own execution imported it.
        reads_directory: Whether it asked for the working directory.
        attributes: Its names after its execution, if it is of a class of its own: such modules add names when they are
            used. None for an ordinary module.
        importer: The module whose execution was the first to import it; "" for none.
        was_executed: False for parts of an extension, which it has put into `sys.modules` itself.
    """

    name: str
    steps: list[str | Effects] = []
    requests: set[str] = set()
    binding: tuple[bool, Any] | None = None
    reads_directory: bool = False
    attributes: frozenset[str] | None = None
    importer: str = ""
    was_executed: bool = True

    def request(self, name: str) -> None:
        """Record the import of a module, if there is one of this name."""
        if name in sys.modules and name not in self.requests:
            self.requests.add(name)
            self.steps.append(name)

    @property
    def reads(self) -> dict[str, str | None]:
        """The environment variables that it read, and their first values; without what it had set itself."""
        found: dict[str, str | None] = {}
        for step in self.steps:
            if isinstance(step, Effects):
                found = {**step.reads, **found}
        return found


class _ExecutingModules:
    """The modules that are being executed; the last one is the innermost."""

    def __init__(self) -> None:
        self.stack: list[RecordedImport] = []

    @property
    def innermost(self) -> RecordedImport | None:
        return self.stack[-1] if self.stack else None

    def has(self, name: str) -> bool:
        return any(record.name == name for record in self.stack)


class ImportRecorder:
    """Records imports.

    Args:
        before_each: Called before each module is executed.
        is_known: Whether a module was recorded before, and is only shown by its import.
        log: Where to add what the modules read and changed, in order.

    Attributes:
        imports: The record of each executed module by its name, in the order in which they were completed.
    """

    def __init__(
        self,
        before_each: Callable[[], None] = lambda: None,
        is_known: Callable[[str], bool] = lambda _: False,
        log: list[Effects] | None = None,
    ) -> None:
        self._before_each = before_each
        self._is_known = is_known
        self._is_showing = False
        self.imports: dict[str, RecordedImport] = {}
        self._log = [] if log is None else log
        self._executing = _ExecutingModules()
        self._patches: list[tuple[Any, str, Any]] = []
        self._warnings = contextlib.ExitStack()
        # the process's state when the innermost module's changes were last attributed to it
        self._modules: set[str] = set()
        self._environ: dict[str, str] = {}
        self._finders: list[Any] = []
        self._filters: list[Any] = []
        self._loggers: set[str] = set()
        # who added a filter, by its id
        self._filter_owners: dict[int, Effects] = {}
        # copies of the whole environment, as for child processes, are not counted as reads of each variable: they list
        # the names, and then read all values in the same order, or each value after its name
        self._iterated = ""
        self._listed: list[str] = []
        self._copied: list[str] = []

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Record all imports within."""
        self._warnings.enter_context(warnings.catch_warnings(record=True))
        # where `catch_warnings` puts it too; it restores the original
        setattr(warnings, "_showwarnmsg_impl", self._warned)  # noqa: B010  it has no type
        warnings.simplefilter("always")
        environment = type(os.environ)
        recorder = self

        get, iterate, get_directory = environment.__getitem__, environment.__iter__, os.getcwd
        register, load, import_absolute = atexit.register, _BOOTSTRAP._load_unlocked, _BOOTSTRAP._gcd_import
        import_statement = builtins.__import__

        def read_variable(self: Any, name: str) -> str:
            recorder._read(name)
            return get(self, name)

        def iterate_variables(self: Any) -> Iterator[str]:
            listed: list[str] = []
            for name in iterate(self):
                recorder._iterated = name
                listed.append(name)
                yield name
            recorder._listed = listed

        def read_directory() -> str:
            if (record := recorder._executing.innermost) is not None:
                record.reads_directory = True
            return get_directory()

        def register_exit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            record = recorder._executing.innermost
            if record is None and not recorder._is_showing:
                return register(function, *args, **kwargs)
            if record is not None and not recorder._is_showing:
                recorder._changes(record).exit_functions.append(ExitFunction(function, args, kwargs))
            return function

        def load_module(spec: ModuleSpec) -> ModuleType:
            return recorder._load(spec, load)

        def gcd_import(name: str, package: str | None = None, level: int = 0) -> ModuleType:
            record = recorder._executing.innermost
            try:
                return import_absolute(name, package, level)
            finally:
                if record is not None:
                    record.request(importlib.util.resolve_name("." * level + name, package) if level else name)

        def statement(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            record = recorder._executing.innermost
            try:
                return import_statement(name, globals, locals, fromlist or (), level)
            finally:
                if record is not None:
                    absolute = _absolute(name, globals or {}, level)
                    record.request(absolute)
                    for item in fromlist or ():
                        record.request(f"{absolute}.{item}")

        self._note_state()
        self._patch(environment, "__getitem__", read_variable)
        self._patch(environment, "__iter__", iterate_variables)
        self._patch(os, "getcwd", read_directory)
        self._patch(atexit, "register", register_exit)
        self._patch(_BOOTSTRAP, "_load_unlocked", load_module)
        self._patch(_BOOTSTRAP, "_gcd_import", gcd_import)
        self._patch(builtins, "__import__", statement)
        try:
            yield
        finally:
            while self._patches:
                owner, name, original = self._patches.pop()
                setattr(owner, name, original)
            self._warnings.close()

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        original = cast("object", vars(owner)[name])
        self._patches.append((owner, name, original))
        setattr(owner, name, replacement)

    def _read(self, name: str) -> None:
        if name == self._iterated and len(self._listed) != len(self._environ):
            self._iterated = ""
            return
        if self._listed and name == self._listed[len(self._copied)]:
            self._copied.append(name)
            if len(self._copied) == len(self._listed):
                self._listed, self._copied = [], []
            return
        self._count_copied()
        self._count(name)

    def _count_copied(self) -> None:
        """Count reads that looked like the beginning of a copy."""
        copied = self._copied
        self._listed, self._copied = [], []
        for name in copied:
            self._count(name)

    def _count(self, name: str) -> None:
        if (record := self._executing.innermost) is not None and not self._is_showing:
            value = _environment().get(name)
            if value == self._environ.get(name):
                self._changes(record).reads.setdefault(name, value)

    def _changes(self, record: RecordedImport) -> Effects:
        """Return the effects since the record's last import."""
        last = record.steps[-1] if record.steps else ""
        if isinstance(last, Effects):
            return last
        return self._begin_step(record)

    def _begin_step(self, record: RecordedImport) -> Effects:
        made = Effects(record.name)
        record.steps.append(made)
        self._log.append(made)
        return made

    def _warned(self, message: warnings.WarningMessage) -> None:
        record = self._executing.innermost
        if record is not None and not self._is_showing:
            self._attribute_filters(record)
            self._changes(record).warnings.append(message)

    def _load(self, spec: ModuleSpec, load: Callable[[ModuleSpec], ModuleType]) -> ModuleType:
        self._before_each()
        self._attribute_changes()
        if self._is_known(spec.name):
            return self._show(spec, load)
        record = RecordedImport(spec.name)
        package, _, child = spec.name.rpartition(".")
        if package and package in sys.modules and not self._executing.has(package):
            value = vars(sys.modules[package]).get(child, _MISSING)
            record.binding = (value is not _MISSING, None if value is _MISSING else value)
        outer = self._executing.innermost
        record.importer = "" if outer is None else outer.name
        self._executing.stack.append(record)
        try:
            module = load(spec)
            if isinstance(getattr(module.__spec__, "loader", None), ExtensionFileLoader):
                # written in C: it imports without `__import__`
                for value in list(vars(module).values()):
                    if isinstance(value, ModuleType):
                        record.request(value.__name__)
        finally:
            self._attribute_changes(but=spec.name)
            self._executing.stack.pop()
        self._modules.add(spec.name)
        if type(module) is not ModuleType and isinstance(cast(object, module), ModuleType):
            record.attributes = frozenset(vars(module))
        self.imports[spec.name] = record
        if outer is not None:
            outer.request(spec.name)
        return module

    def _show(self, spec: ModuleSpec, load: Callable[[ModuleSpec], ModuleType]) -> ModuleType:
        """Import a module that was recorded before; what that changes is recorded already."""
        outer, is_showing = self._executing.innermost, self._is_showing
        self._is_showing = True
        try:
            module = load(spec)
        finally:
            self._is_showing = is_showing
            self._note_state()
        # the last one in `sys.modules` when the import is complete
        if outer is not None:
            outer.request(spec.name)
        return module

    # ------------------------------------------------------------ changes of the process

    def _note_state(self) -> None:
        self._modules = set(sys.modules)
        self._environ = _environment()
        self._finders = list(sys.meta_path)
        self._filters = list(warnings.filters)
        self._loggers = {name for name, logger in _loggers().items() if isinstance(logger, logging.Logger)}

    def _attribute_changes(self, but: str = "") -> None:
        """Attribute what has changed since the last call to the innermost module.

        Args:
            but: A module that is in `sys.modules` by its own import.
        """
        self._count_copied()
        record = self._executing.innermost
        if record is None:
            self._note_state()
            return
        for name in self._modules_added(but):
            # put there directly, as extensions do with their parts
            self._modules.add(name)
            self.imports[name] = RecordedImport(name, importer=record.name, was_executed=False)
            record.request(name)
        environ = _environment()
        if environ != self._environ:
            changed = self._changes(record).environ
            for name in environ.keys() | self._environ.keys():
                before, after = self._environ.get(name), environ.get(name)
                if before != after:
                    changed[name] = (changed[name][0] if name in changed else before, after)
            self._environ = environ
        known = {id(finder) for finder in self._finders}
        if new := [(each, at == 0) for at, each in enumerate(sys.meta_path) if id(each) not in known]:
            self._changes(record).finders += new
        self._finders = list(sys.meta_path)
        self._attribute_filters(record)
        loggers = _loggers()
        if new := [name for name in loggers.keys() - self._loggers if isinstance(loggers[name], logging.Logger)]:
            self._changes(record).loggers += new
            self._loggers.update(new)

    def _modules_added(self, but: str) -> list[str]:
        return [
            name for name in sys.modules if name not in self._modules and name != but and not self._executing.has(name)
        ]

    def _attribute_filters(self, record: RecordedImport) -> None:
        if list(map(id, warnings.filters)) == list(map(id, self._filters)):
            return
        now = {id(each) for each in warnings.filters}
        before = {id(each) for each in self._filters}
        added = [each for each in warnings.filters if id(each) not in before]
        for each in self._filters:
            # the end of a `catch_warnings` has removed it, and not the addition of an equal one
            if (
                id(each) not in now
                and each not in added
                and (owner := self._filter_owners.pop(id(each), None)) is not None
            ):
                owner.filters = [kept for kept in owner.filters if kept is not each]
        if added:
            changes = self._changes(record)
            if changes.warnings:
                # these came before
                changes = self._begin_step(record)
            changes.filters[:0] = added
            self._filter_owners |= dict.fromkeys(map(id, added), changes)
        self._filters = list(warnings.filters)


def dependents_of(names: Iterable[str], imports: Mapping[str, RecordedImport]) -> set[str]:
    """Return the modules, and all those that import one of them or are inside one of them, directly or not."""
    users: dict[str, list[str]] = {}
    for name, record in imports.items():
        package = name.rpartition(".")[0]
        for needed in (*record.requests, *([package] if package else [])):
            users.setdefault(needed, []).append(name)
    pending = list(names)
    found = set(pending)
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in found:
                found.add(user)
                pending.append(user)
    return found


def _environment() -> dict[str, str]:
    """Return the environment without counting as a read of it."""
    decode = os.environ.decodevalue
    return {decode(name): decode(value) for name, value in os.environ._data.items()}  # pyright: ignore


def _loggers() -> dict[str, Any]:
    return vars(logging.Logger.manager)["loggerDict"]


def _absolute(name: str, variables: Mapping[str, Any], level: int) -> str:
    """Return the absolute name of an `import` statement's module."""
    if not level:
        return name
    package = variables.get("__package__")
    if package is None:
        package = variables.get("__name__", "")
        if "__path__" not in variables:
            package = package.rpartition(".")[0]
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base
