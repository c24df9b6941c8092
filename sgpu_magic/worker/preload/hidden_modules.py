"""Modules that the zygote has executed, and that appear in a rank when its code imports them.

A rank sees what it would see without them: until their import they are neither in `sys.modules` nor attributes of
their packages, and their effects on the process, such as warning filters, are undone. Their import then repeats, module
by module, what their execution has done, in the same order. That takes tens of milliseconds where their execution took
seconds.
"""

# the import system's own functions have no types
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from sgpu_magic.worker.preload.import_recorder import Effects, ImportRecorder, RecordedImport, dependents_of


class _Plan(msgspec.Struct, frozen=True):
    """What the import of a module does, with those that it imports.

    It stays valid when some of these modules are shown: whatever a shown module imports is shown too, so the order of
    the others is the same without it.

    Args:
        steps: Changes of the process, and hidden modules when they are complete, in order.
        tops: The top-level packages of these modules.
        readers: Those of the steps that depend on the environment or the working directory, or change the environment.
    """

    steps: list[str | Effects]
    tops: frozenset[str]
    readers: list[str | Effects]


class HiddenModules(MetaPathFinder):
    """Finds hidden modules; the first entry of `sys.meta_path` while there are any.

    Attributes:
        conflict: A module that a recorded import would have executed otherwise than an import before; "" for none.
    """

    def __init__(self) -> None:
        self._imports: dict[str, RecordedImport] = {}
        self._modules: dict[str, ModuleType] = {}
        self._specs: dict[str, ModuleSpec | None] = {}
        # what `plan` has computed
        self._plans: dict[str, _Plan] = {}
        self._bindings: dict[str, tuple[str, str]] = {}
        # changes of the process by the modules that are not hidden, in their order
        self._made: list[Effects] = []
        self._directory = ""
        self._is_recording = False
        self.conflict = ""
        # loggers by the module that has made them, also if it was executed again, when they existed
        self._loggers: dict[str, list[str]] = {}
        # top-level modules that no other file on `sys.path` comes before
        self._unshadowed: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The modules that are hidden now."""
        return list(self._modules)

    # ------------------------------------------------------------ in the zygote

    def recorder(self, before_each: Callable[[], None] = lambda: None) -> ImportRecorder:
        """Return a recorder for imports that `hide` hides.

        Args:
            before_each: Called before each module is executed.
        """
        self._is_recording = True
        return ImportRecorder(before_each, self._imports.__contains__, self._made)

    def hide(self, imports: Mapping[str, RecordedImport]) -> None:
        """Undo imports as far as a rank can see them, together with those of earlier calls.

        Args:
            imports: Records of the newly executed modules by name, in the order in which they were completed.
        """
        self._is_recording = False
        self._directory = os.getcwd()
        for name, record in imports.items():
            for step in record.steps:
                if isinstance(step, Effects) and step.loggers:
                    self._loggers.setdefault(name, []).extend(step.loggers)
        self._imports |= imports
        for name, record in reversed(self._imports.items()):
            module = sys.modules.pop(name, None)
            if module is None:
                continue
            self._modules[name] = module
            if name in imports:
                self._specs[name] = getattr(module, "__spec__", None)
            self._unbind(record, module)
            if record.attributes is not None:
                for added in vars(module).keys() - record.attributes:
                    vars(module).pop(added, None)
        for effects in reversed(self._made):
            _undo(effects)
        self._made.clear()
        self._bindings = self._bindings_of({name: name for name in self._modules})
        if self._modules and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def plan(self, names: Iterable[str]) -> None:
        """Compute what the imports of these modules will do, so that ranks need not; a rank computes any other one."""
        # a rank that shows modules writes to the pages of their names, for the reference counts, and each page is
        # copied at the first write: names that are made one after the other are on few pages
        own = {name: name.encode().decode() for name in self._modules}
        self._modules = {own[name]: module for name, module in self._modules.items()}
        self._plans = {name: self._plan_of(name, own) for name in names if name in self._modules}
        self._bindings = self._bindings_of(own)

    @staticmethod
    def _unbind(record: RecordedImport, module: ModuleType) -> None:
        package, _, child = record.name.rpartition(".")
        parent = sys.modules.get(package)
        if record.binding is None or parent is None or vars(parent).get(child) is not module:
            return
        existed, value = record.binding
        if existed:
            setattr(parent, child, value)
        else:
            delattr(parent, child)

    # ------------------------------------------------------------ in a rank

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a hidden module, as its own finder returned it, with a loader that shows the module."""
        if fullname not in self._modules:
            return None
        plan = self._plans.get(fullname) or self._plan_of(fullname)
        outdated = [top for top in plan.tops - self._unshadowed if self._is_shadowed(top)]
        outdated += self._read_otherwise(plan.readers)
        if outdated and self._is_recording:
            self.conflict = outdated[0]
        elif outdated:
            # their execution would not be the same here, so they are executed again, and what depends on them
            self._forget(list(self._executable(dependents_of(outdated, self._imports))))
            return self.find_spec(fullname, path, target)
        real = self._specs[fullname]
        spec = ModuleSpec(fullname, _HiddenLoader(real, functools.partial(self._show_all, fullname, plan.steps)))
        if real is not None:
            spec.origin, spec.submodule_search_locations = real.origin, real.submodule_search_locations
            spec.has_location = real.has_location
            if real.has_location:
                spec.cached = real.cached
        return spec

    def _is_shadowed(self, top: str) -> bool:
        """Whether `sys.path` has another module of this name before the hidden one, or no longer has the hidden one."""
        spec = self._specs.get(top)
        # the parts of an extension may have names that no file has
        if spec is None or spec.name != top or not spec.has_location or spec.origin is None:
            self._unshadowed.add(top)
            return False
        inside, file = os.path.split(spec.origin)
        if file.startswith("__init__."):
            inside = os.path.dirname(inside)
        for entry in sys.path:
            if entry == inside:
                self._unshadowed.add(top)
                return False
            if PathFinder.find_spec(top, [entry]) is not None:
                return True
        return True

    def _read_otherwise(self, readers: Iterable[str | Effects]) -> Iterator[str]:
        """Yield the modules that would read other values now than they have read."""
        environ = dict(os.environ)
        is_there = os.getcwd() == self._directory
        for step in readers:
            if isinstance(step, str):
                if not is_there and step in self._modules:
                    yield step
                continue
            if step.module not in self._modules:
                continue
            if any(environ.get(name) != value for name, value in step.reads.items()):
                yield step.module
            for name, (before, after) in step.environ.items():
                _change(environ, name, before, after)

    def _executable(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the modules that can be executed again. Most of those in C can't, within one process."""
        for name in names:
            spec = self._specs.get(name)
            if spec is not None and not isinstance(spec.loader, ExtensionFileLoader):
                yield name

    def _forget(self, names: Iterable[str]) -> None:
        # what they import is shown at its own import, and not before
        self._plans.clear()
        for name in names:
            if self._modules.pop(name, None) is not None:
                del self._imports[name]
                _enable(self._loggers.get(name, ()))
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if not self._modules and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _show_all(self, name: str, steps: Sequence[str | Effects]) -> None:
        """Show a module and what it imported. An interrupt waits until that is done."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            awaited = _awaited_by_finders(self)
            for step in steps:
                if isinstance(step, Effects):
                    if step.module in self._modules and (step.module == name or step.module not in awaited):
                        _repeat(step, vars(self._modules[step.module]))
                        self._made.append(step)
                elif step not in self._modules or step == name:
                    continue
                elif step in awaited:
                    importlib.import_module(step)
                else:
                    self._show(step)
            _enable(self._loggers.get(name, ()))
            sys.modules[name] = self._modules.pop(name)
            self._leave_if_empty()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _show(self, name: str) -> None:
        module = sys.modules[name] = self._modules.pop(name)
        if name in self._loggers:
            _enable(self._loggers[name])
        if name in self._bindings:
            package, child = self._bindings[name]
            if package in sys.modules:
                setattr(sys.modules[package], child, module)

    def _bindings_of(self, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return, for each module that its import makes an attribute of its package: the package, and its own name."""
        split = {own: name.rpartition(".") for name, own in names.items() if self._imports[name].binding is not None}
        return {own: (names.get(package, package), child) for own, (package, _, child) in split.items()}

    def _plan_of(self, name: str, own: Mapping[str, str] = MappingProxyType({})) -> _Plan:
        steps = [own.get(step, step) if isinstance(step, str) else step for step in self._in_order(name)]
        readers = [step for step in steps if self._reads(step)]
        return _Plan(steps, frozenset(step.partition(".")[0] for step in steps if isinstance(step, str)), readers)

    def _reads(self, step: str | Effects) -> bool:
        return bool(step.reads or step.environ) if isinstance(step, Effects) else self._imports[step].reads_directory

    def _in_order(self, name: str) -> Iterator[str | Effects]:
        """Yield what an import of `name` does: changes of the process, and hidden modules when they are complete."""
        visited = {name}
        pending: list[tuple[str, Iterator[str | Effects]]] = [(name, self._steps(name))]
        while pending:
            at, steps = pending[-1]
            for step in steps:
                if isinstance(step, Effects):
                    yield step
                elif step in self._modules and step not in visited:
                    visited.add(step)
                    pending.append((step, self._steps(step)))
                    break
            else:
                pending.pop()
                yield at

    def _steps(self, name: str) -> Iterator[str | Effects]:
        yield from _packages(name)
        for step in self._imports[name].steps:
            if isinstance(step, str):
                yield from _packages(step)
            yield step


class _HiddenLoader(Loader):
    """Shows a hidden module. In everything else it is like the module's own loader."""

    def __init__(self, spec: ModuleSpec | None, show: Callable[[], None]) -> None:
        self._real = None if spec is None else spec.loader
        self._show = show

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system, which would call a `__getattr__` of the hidden module."""

    def exec_module(self, module: ModuleType) -> None:
        self._show()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _packages(name: str) -> Iterator[str]:
    """Yield the packages of a module, the outermost first."""
    at = name.find(".")
    while at > 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _awaited_by_finders(hidden: HiddenModules) -> set[str]:
    """Return the modules for which a finder before the hidden ones waits, to change them after their import."""
    names: set[str] = set()
    for finder in sys.meta_path:
        if finder is hidden:
            break
        names.update(getattr(finder, "names", ()))
    return names


def _change(environ: MutableMapping[str, str], name: str, before: str | None, after: str | None) -> None:
    """Change a variable from one value to another, None for unset. Another value than the first one is left alone."""
    if environ.get(name) != before:
        return
    if after is None:
        environ.pop(name, None)
    else:
        environ[name] = after


def _undo(effects: Effects) -> None:
    for name, (before, after) in effects.environ.items():
        _change(os.environ, name, after, before)
    for finder, _ in effects.finders:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def _repeat(effects: Effects, variables: dict[str, Any]) -> None:
    for name, (before, after) in effects.environ.items():
        _change(os.environ, name, before, after)
    for finder, is_first in effects.finders:
        sys.meta_path.insert(0 if is_first else len(sys.meta_path), finder)
    for each in reversed(effects.filters):
        if each in warnings.filters:
            warnings.filters.remove(each)  # pyright: ignore[reportAttributeAccessIssue]
        warnings.filters.insert(0, each)  # pyright: ignore[reportAttributeAccessIssue]
    if effects.filters:
        vars(warnings)["_filters_mutated"]()
    for call in effects.exit_functions:
        atexit.register(call.function, *call.args, **call.kwargs)
    for issued in effects.warnings:
        warnings.warn_explicit(
            issued.message,
            issued.category,
            issued.filename,
            issued.lineno,
            module=effects.module if issued.filename == variables.get("__file__") else None,
            registry=variables.setdefault("__warningregistry__", {}),
            source=issued.source,
        )


def _enable(loggers: Iterable[str]) -> None:
    """Undo what `logging.config` does to loggers that exist: these would not have existed before the import."""
    for name in loggers:
        logger = vars(logging.Logger.manager)["loggerDict"].get(name)
        if isinstance(logger, logging.Logger):
            logger.disabled = False
