"""Settings of a process that code sets by calls: dtypes, print options, logging, warnings ...

A rank takes over the notebook's, as it takes over its directory and environment. Each `SettingGroup` belongs to a
module and reads and sets that module's settings by key. Only modules that the notebook has imported are read, only
values that differ from the defaults are sent, and a rank applies those of a module once it has imported the module.

Importing this module imports none of the modules that it reads.
"""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import json
import operator
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sgpu_magic.system import collector
from sgpu_magic.wire.decoding import load_json

Values = dict[str, Any]
"""Values by key, as JSON has them."""

# raised if a module or object lacks a name: it has another version, or is being imported
_ABSENT = (AttributeError, ImportError, KeyError, LookupError, RuntimeError, TypeError, ValueError)
_GC_DEFAULTS = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0), (2000, 5, 10))
_SDP = ("flash", "mem_efficient", "math", "cudnn")
_NUMPY_PRINT = {
    "precision": 8, "threshold": 1000, "edgeitems": 3, "linewidth": 75, "suppress": False, "nanstr": "nan",
    "infstr": "inf", "sign": "-", "floatmode": "maxprec", "legacy": False,
}  # fmt: skip
_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
# modes that call a function, which can't be sent
_WITH_FUNCTION = ("call", "log")

# an option that is a string's method: `"{:.2f}".format`
_FORMAT = "str.format"
_CYCLER = "cycler"
# options of the figure's window, which a rank does not have
_OF_WINDOWS = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")

# loggers of the programs that run a notebook
_NOT_USERS = (
    "IPKernelApp",
    "IPython",
    "TerminalIPythonApp",
    "asyncio",
    "comm",
    "ipykernel",
    "jupyter_client",
    "parso",
    "tornado",
    "traitlets",
    "zmq",
)
# torch's loggers are set by TORCH_LOGS; a level is sent nevertheless
_SET_BY_VARIABLES = "torch"
# packages that add a handler to the root logger when they are imported
_ADD_TO_ROOT = ("absl",)
_ROOT = ""
_STYLES = {"PercentStyle": "%", "StrFormatStyle": "{", "StringTemplateStyle": "$"}
_STREAMS = ("stderr", "stdout", "__stderr__", "__stdout__")
_DECIMAL = {
    "prec": 28, "rounding": "ROUND_HALF_EVEN", "Emin": -999999, "Emax": 999999, "capitals": 1, "clamp": 0,
    "traps": ["DivisionByZero", "InvalidOperation", "Overflow"],
}  # fmt: skip
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")


class SettingGroup:
    """The settings of one module.

    Attributes:
        name: Name of the group.
        module: The module; its settings are read once it is imported.
    """

    name = ""
    module = ""

    def read(self, module: Any) -> Values:
        """Return the values that differ from the defaults."""
        raise NotImplementedError

    def get(self, module: Any, key: str) -> Any:
        """Return one value, for `set`."""
        raise NotImplementedError

    def set(self, module: Any, key: str, value: Any) -> None:
        """Set one value."""
        raise NotImplementedError

    def is_set(self, current: Any, value: Any) -> bool:
        """Whether a value that `get` returned is the same as one to set."""
        return current == value

    def waits_for(self, key: str, value: Any) -> str:
        """Return a module without which the setting has no use, "" if it is set at once."""
        del key, value
        return ""

    def owners(self, key: str, value: Any) -> Iterable[str]:
        """Return modules that may set it at their import: it is set again after that."""
        del key, value
        return ()

    def left_behind(self, module: Any) -> Iterable[str]:
        """Return descriptions of the module's settings that can't be sent."""
        del module
        return ()


class Setting(NamedTuple):
    """One setting with a getter and a setter.

    Args:
        get: Returns its value, given the module.
        set: Sets it, given the module and a value.
        default: The value that is not sent; a collection of several.
    """

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    default: Any


class Table(SettingGroup):
    """A group whose settings are independent of each other."""

    def __init__(self, module: str, settings: Mapping[str, Setting]) -> None:
        self.name = self.module = module
        self.settings = settings

    def read(self, module: Any) -> Values:
        found: Values = {}
        for key, setting in self.settings.items():
            with contextlib.suppress(*_ABSENT):
                value = setting.get(module)
                if value != setting.default:
                    found[key] = value
        return found

    def get(self, module: Any, key: str) -> Any:
        return self.settings[key].get(module)

    def set(self, module: Any, key: str, value: Any) -> None:
        self.settings[key].set(module, value)


def _attribute(path: str, default: Any) -> Setting:
    owner, _, name = path.rpartition(".")
    owner_of: Callable[[Any], Any] = operator.attrgetter(owner) if owner else lambda module: module
    return Setting(
        lambda module: getattr(owner_of(module), name),
        lambda module, value: setattr(owner_of(module), name, value),
        default,
    )


def _calls(getter: str, setter: str, default: Any) -> Setting:
    get, set_ = operator.attrgetter(getter), operator.attrgetter(setter)
    return Setting(lambda module: get(module)(), lambda module, value: set_(module)(value), default)


# ---------------------------------------------------------------- torch and numpy


def _default_device(torch: Any) -> str:
    # without the index of the GPU: each rank has its own
    return torch.get_default_device().type


def _set_default_device(torch: Any, kind: str) -> None:
    if kind != "cuda" or torch.cuda.is_available():
        torch.set_default_device(kind)


def _set_sdp(torch: Any, enabled: Sequence[bool]) -> None:
    for kind, is_enabled in zip(_SDP, enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_enabled)


def _set_print_options(torch: Any, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        setattr(torch._tensor_str.PRINT_OPTS, name, value)


TORCH = Table(
    "torch",
    {
        "default_dtype": Setting(
            lambda torch: str(torch.get_default_dtype()).rpartition(".")[2],
            lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
            "float32",
        ),
        "default_device": Setting(_default_device, _set_default_device, "cpu"),
        "float32_matmul_precision": _calls(
            "get_float32_matmul_precision", "set_float32_matmul_precision", default="highest"
        ),
        "matmul_tf32": _attribute("backends.cuda.matmul.allow_tf32", default=False),
        "fp16_reduction": _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", default=True),
        "bf16_reduction": _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", default=True),
        "cudnn_tf32": _attribute("backends.cudnn.allow_tf32", default=True),
        "cudnn_enabled": _attribute("backends.cudnn.enabled", default=True),
        "cudnn_benchmark": _attribute("backends.cudnn.benchmark", default=False),
        "cudnn_deterministic": _attribute("backends.cudnn.deterministic", default=False),
        "sdp": Setting(
            lambda torch: [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _SDP],
            _set_sdp,
            [True for _ in _SDP],
        ),
        "deterministic": _calls("get_deterministic_debug_mode", "set_deterministic_debug_mode", default=0),
        "fill_uninitialized_memory": _attribute("utils.deterministic.fill_uninitialized_memory", default=True),
        "anomaly": Setting(
            lambda torch: [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
            lambda torch, value: torch.autograd.set_detect_anomaly(*value),
            [False, True],
        ),
        "grad": _calls("is_grad_enabled", "set_grad_enabled", default=True),
        "warn_always": _calls("is_warn_always_enabled", "set_warn_always", default=False),
        "sharing_strategy": _calls(
            "multiprocessing.get_sharing_strategy", "multiprocessing.set_sharing_strategy", default="file_descriptor"
        ),
        "print_options": Setting(
            lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
            _set_print_options,
            {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
        ),
    },
)


class Numpy(SettingGroup):
    """Print options, and what happens on floating-point errors."""

    name = module = "numpy"

    def read(self, module: Any) -> Values:
        printed = module.get_printoptions()
        found = {key: printed[key] for key, default in _NUMPY_PRINT.items() if printed.get(key, default) != default}
        errors = module.geterr()
        for key, default in _NUMPY_ERRORS.items():
            if errors[key] != default and errors[key] not in _WITH_FUNCTION:
                found[key] = errors[key]
        return found

    def get(self, module: Any, key: str) -> Any:
        return (module.geterr() if key in _NUMPY_ERRORS else module.get_printoptions())[key]

    def set(self, module: Any, key: str, value: Any) -> None:
        (module.seterr if key in _NUMPY_ERRORS else module.set_printoptions)(**{key: value})

    def left_behind(self, module: Any) -> Iterator[str]:
        if module.get_printoptions().get("formatter"):
            yield "numpy's print formatter"
        if not set(_WITH_FUNCTION).isdisjoint(module.geterr().values()):
            yield "numpy's error handler"


# ---------------------------------------------------------------- pandas and matplotlib


def _plain(value: Any) -> Any:
    """Return the value in JSON's types.

    Raises:
        TypeError: JSON has no type for it.
    """
    if getattr(value, "__name__", "") == "format" and isinstance(getattr(value, "__self__", None), str):
        return {_FORMAT: value.__self__}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    raise TypeError(f"a {type(value).__name__} can't be sent")


def _from_plain(value: Any) -> Any:
    return value[_FORMAT].format if isinstance(value, dict) and _FORMAT in value else value


class Pandas(SettingGroup):
    """The options of `pandas.set_option`."""

    name = module = "pandas"

    def _options(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the options that are not at their defaults."""
        config: Any = sys.modules["pandas._config.config"]
        for key, option in config._registered_options.items():
            if key in config._deprecated_options:
                # reading a deprecated option warns
                continue
            value: Any = config._global_config
            for part in key.split("."):
                value = value[part]
            if value is not option.defval and value != option.defval:
                yield key, value

    def read(self, module: Any) -> Values:
        found: Values = {}
        for key, value in self._options(module):
            with contextlib.suppress(TypeError):
                found[key] = _plain(value)
        return found

    def get(self, module: Any, key: str) -> Any:
        return _plain(module.get_option(key))

    def set(self, module: Any, key: str, value: Any) -> None:
        module.set_option(key, _from_plain(value))

    def left_behind(self, module: Any) -> Iterator[str]:
        for key, value in self._options(module):
            try:
                _plain(value)
            except TypeError:
                yield f"the function in pandas' {key}"


class Matplotlib(SettingGroup):
    """`rcParams`, as a style sets them."""

    name = module = "matplotlib"

    def read(self, module: Any) -> Values:
        found: Values = {}
        defaults = module.rcParamsDefault
        for key, value in dict.items(module.rcParams):
            default = dict.get(defaults, key)
            if value is default or value == default or key in _OF_WINDOWS or key.startswith("webagg"):
                continue
            with contextlib.suppress(TypeError):
                found[key] = self._plain(value)
        return found

    def _plain(self, value: Any) -> Any:
        return {_CYCLER: value.by_key()} if hasattr(value, "by_key") else _plain(value)

    def get(self, module: Any, key: str) -> Any:
        return self._plain(module.rcParams[key])

    def set(self, module: Any, key: str, value: Any) -> None:
        if isinstance(value, dict) and _CYCLER in value:
            value = sys.modules["cycler"].cycler(**value[_CYCLER])
        module.rcParams[key] = value


# ---------------------------------------------------------------- logging and warnings


class Logging(SettingGroup):
    """Levels of loggers, and handlers that write to the standard streams, as `basicConfig` sets them.

    The keys are the names of loggers, "" for the root, and the names of two functions.
    """

    name = module = "logging"
    _disabled_below = "disable()"
    _captures = "captureWarnings()"

    def read(self, module: Any) -> Values:
        found: Values = {}
        for name, logger in self._loggers(module):
            if name.startswith(_SET_BY_VARIABLES) and logger.level == module.NOTSET:
                continue
            values = self._of_logger(module, logger)
            package = name.partition(".")[0]
            found[name] = values | {"package": package != "__main__" and package in sys.modules}
        if module.root.manager.disable:
            found[self._disabled_below] = module.root.manager.disable
        if module._warnings_showwarning is not None:
            found[self._captures] = True
        return found

    def get(self, module: Any, key: str) -> Any:
        if key == self._disabled_below:
            return module.root.manager.disable
        if key == self._captures:
            return module._warnings_showwarning is not None
        return self._of_logger(module, module.getLogger(key or None))

    def set(self, module: Any, key: str, value: Any) -> None:
        if key == self._disabled_below:
            module.disable(value)
            return
        if key == self._captures:
            module.captureWarnings(value)
            return
        logger = module.getLogger(key or None)
        logger.setLevel(value["level"])
        logger.propagate, logger.disabled = value["propagate"], value["disabled"]
        if value.get("package") and key.partition(".")[0] not in sys.modules:
            # the package adds its own handlers when it is imported
            return
        wanted: list[Any] = value["handlers"]
        for handler in list(logger.handlers):
            described = self._of_handler(module, handler)
            if described in wanted:
                wanted = [each for each in wanted if each != described]
            elif described is not None:
                logger.removeHandler(handler)
        for each in wanted:
            handler = module.StreamHandler(getattr(sys, each["stream"]))
            handler.setLevel(each["level"])
            if each["format"] is not None:
                handler.setFormatter(module.Formatter(*each["format"]))
            logger.addHandler(handler)

    def is_set(self, current: Any, value: Any) -> bool:
        # to set a level empties the caches of all loggers, and copies their pages in a forked process
        return current == value or (
            isinstance(value, dict) and current == {name: each for name, each in value.items() if name != "package"}
        )

    def waits_for(self, key: str, value: Any) -> str:
        return key.partition(".")[0] if isinstance(value, dict) and value.get("package") else ""

    def owners(self, key: str, value: Any) -> Iterable[str]:
        package = key.partition(".")[0]
        # the package may set levels when it is imported, which the notebook's code has changed afterwards
        return (package,) if package and "(" not in package else ()

    def left_behind(self, module: Any) -> Iterator[str]:
        for name, logger in self._loggers(module):
            if logger.handlers and name.partition(".")[0] in sys.modules and not name.startswith("__main__"):
                # the package's own handlers are there on the ranks too
                continue
            for handler in logger.handlers:
                kind = type(handler)
                by_import = kind.__module__.partition(".")[0] in _ADD_TO_ROOT
                if self._of_handler(module, handler) is None and kind is not module.NullHandler and not by_import:
                    yield f"the {type(handler).__name__} of {f'logger {name}' if name else 'the root logger'}"

    def _loggers(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the loggers of which something was set."""
        root = module.root
        if root.level != module.WARNING or root.handlers or root.disabled:
            yield _ROOT, root
        placeholder = module.PlaceHolder
        for name, logger in list(root.manager.loggerDict.items()):
            if type(logger) is placeholder:
                continue
            if (logger.level or logger.handlers or logger.disabled or not logger.propagate) and name.partition(".")[
                0
            ] not in _NOT_USERS:
                yield name, logger

    def _of_logger(self, module: Any, logger: Any) -> Values:
        described = (self._of_handler(module, handler) for handler in logger.handlers)
        return {
            "level": logger.level,
            "propagate": bool(logger.propagate),
            "disabled": bool(logger.disabled),
            "handlers": [each for each in described if each is not None],
        }

    def _of_handler(self, module: Any, handler: Any) -> Values | None:
        """Describe a plain handler of a standard stream; return None for others."""
        if type(handler) is not module.StreamHandler or handler.filters:
            return None
        streams = {id(getattr(sys, name, None)): name.strip("_") for name in _STREAMS}
        stream = streams.get(id(handler.stream))
        formatter = handler.formatter
        if stream is None or (formatter is not None and type(formatter) is not module.Formatter):
            return None
        layout = None
        if formatter is not None:
            layout = [formatter._fmt, formatter.datefmt, _STYLES.get(type(formatter._style).__name__, "%")]
        return {"stream": stream, "level": handler.level, "format": layout}


class Warnings(SettingGroup):
    """The warnings filters, as one list: their order decides."""

    name = module = "warnings"
    _key = "filters"

    def __init__(self) -> None:
        # the rank's filters before the notebook's were applied
        self._own: list[list[Any]] | None = None
        self._set: list[Any] = []

    def read(self, module: Any) -> Values:
        return {self._key: self.get(module, self._key)}

    def get(self, module: Any, key: str) -> Any:
        return [each for each in map(self._described, list(module.filters)) if each is not None]

    def set(self, module: Any, key: str, value: Any) -> None:
        now = self.get(module, key)
        own = self._own = now if self._own is None else self._own
        # filters that the rank's code has added stay in front
        added = [each for each in now if each not in own and each not in self._set]
        self._set = value
        rest = [each for each in own if each not in value]
        kept = [each for each in module.filters if self._described(each) is None]
        module.resetwarnings()
        for action, message, category, where, line in [*added, *value, *rest]:
            kind = self._category(category)
            if kind is not None:
                module.filterwarnings(action, message or "", kind, where or "", line, append=True)
        module.filters[:0] = kept
        with contextlib.suppress(AttributeError):
            module._filters_mutated()

    def owners(self, key: str, value: Any) -> Iterable[str]:
        return {category.partition(":")[0] for _, _, category, _, _ in value}

    def _described(self, entry: Any) -> list[Any] | None:
        action, message, category, where, line = entry
        home = getattr(category, "__module__", None)
        if not isinstance(home, str) or home == "__main__":
            return None
        texts = [getattr(each, "pattern", each) for each in (message, where)]
        return [action, texts[0], f"{home}:{category.__qualname__}", texts[1], line]

    def _category(self, name: str) -> Any:
        home, _, path = name.partition(":")
        try:
            return operator.attrgetter(path)(sys.modules[home])
        except (KeyError, AttributeError):
            # not imported yet, or another version
            return None


# ---------------------------------------------------------------- the standard library


def _decimal_context(decimal: Any) -> Values:
    context = decimal.getcontext()
    numbers = {name: getattr(context, name) for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")}
    return numbers | {"traps": sorted(signal_.__name__ for signal_, is_on in context.traps.items() if is_on)}


def _set_decimal_context(decimal: Any, value: Mapping[str, Any]) -> None:
    numbers = {name: each for name, each in value.items() if name != "traps"}
    decimal.setcontext(decimal.Context(**numbers, traps=[getattr(decimal, name) for name in value["traps"]]))


def _locale_setting(category: str) -> Setting:
    return Setting(
        lambda module: module.setlocale(getattr(module, category)),
        lambda module, value: module.setlocale(getattr(module, category), value),
        "C",
    )


def _set_start_method(multiprocessing: Any, method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)


class _OneOf:
    """Equal to each of several values."""

    def __init__(self, values: Collection[Any]) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        return other in self._values

    __hash__ = None  # pyright: ignore[reportAssignmentType]


GROUPS: tuple[SettingGroup, ...] = (
    TORCH,
    Numpy(),
    Pandas(),
    Matplotlib(),
    Logging(),
    Warnings(),
    Table("decimal", {"context": Setting(_decimal_context, _set_decimal_context, _DECIMAL)}),
    Table(
        "locale",
        {name: _locale_setting(name) for name in ("LC_NUMERIC", "LC_TIME", "LC_COLLATE", "LC_MONETARY", "LC_MESSAGES")},
    ),
    Table(
        "sys",
        {
            "recursionlimit": _calls("getrecursionlimit", "setrecursionlimit", default=1000),
            "int_max_str_digits": _calls("get_int_max_str_digits", "set_int_max_str_digits", default=4300),
            "switchinterval": _calls("getswitchinterval", "setswitchinterval", default=0.005),
            "dont_write_bytecode": _attribute("dont_write_bytecode", default=False),
        },
    ),
    Table(
        "gc",
        {
            "threshold": Setting(
                lambda gc: list(gc.get_threshold()),
                lambda gc, value: gc.set_threshold(*value),
                _OneOf([list(each) for each in _GC_DEFAULTS]),
            ),
            "enabled": Setting(
                lambda gc: collector.is_enabled(), lambda gc, on: gc.enable() if on else gc.disable(), default=True
            ),
        },
    ),
    Table("socket", {"defaulttimeout": _calls("getdefaulttimeout", "setdefaulttimeout", default=None)}),
    Table(
        "multiprocessing",
        {
            "start_method": Setting(
                lambda module: module.get_start_method(allow_none=True), _set_start_method, default=None
            )
        },
    ),
    Table(
        "time",
        {
            "zone": Setting(
                lambda module: list(module.tzname) if "TZ" in os.environ else None,
                lambda module, _: module.tzset(),
                default=None,
            )
        },
    ),
)


# ---------------------------------------------------------------- in the notebook


def read_settings() -> dict[str, str]:
    """Return this process's settings that differ from the defaults, by group and key, as JSON."""
    found: dict[str, str] = {}
    for group in GROUPS:
        module = sys.modules.get(group.module)
        if module is None:
            continue
        with contextlib.suppress(*_ABSENT):
            values = group.read(module)
            found.update((f"{group.name}/{key}", json.dumps(value)) for key, value in values.items())
    return found


def left_behind() -> list[str]:
    """Return descriptions of this process's settings that can't be sent to ranks."""
    found: list[str] = []
    for group in GROUPS:
        module = sys.modules.get(group.module)
        if module is not None:
            with contextlib.suppress(*_ABSENT):
                found.extend(group.left_behind(module))
    for name in _SIGNALS:
        handler = signal.getsignal(getattr(signal, name))
        if getattr(handler, "__module__", None) == "__main__":
            found.append(f"the handler of {name}")
    return found


# ---------------------------------------------------------------- on a rank


class ProcessSettings:
    """The notebook's settings on a rank. Those that the rank's code changes stay until the notebook's change.

    Args:
        after_import: Calls a function with each of these modules after its import.
    """

    def __init__(self, after_import: Callable[[tuple[str, ...], Callable[[Any], None]], None]) -> None:
        self._after_import = after_import
        self._wanted: dict[str, str] = {}
        self._before: dict[str, Any] = {}
        self._awaited: set[str] = set()

    def follow(self, wanted: Mapping[str, str]) -> list[str]:
        """Apply what has changed since the last call, and what the notebook has put back to its default.

        Returns:
            Sentences about settings that this process refused.
        """
        old, self._wanted = self._wanted, dict(wanted)
        changed = [key for key in {**old, **wanted} if old.get(key) != wanted.get(key)]
        return self._apply(changed)

    def _apply(self, changed: Iterable[str]) -> list[str]:
        problems: list[str] = []
        awaited: set[str] = set()
        found: list[tuple[str, SettingGroup, Any, str]] = []
        for full in changed:
            name, _, key = full.partition("/")
            # a setting from a newer version has no group here
            for group in (group for group in GROUPS if group.name == name):
                module = sys.modules.get(group.module)
                if module is None:
                    awaited.add(group.module)
                else:
                    found.append((full, group, module, key))
        # read all values before setting any: one setting may change another
        for full, group, module, key in found:
            if full not in self._before:
                with contextlib.suppress(*_ABSENT):
                    self._before[full] = group.get(module, key)
        for full, group, module, key in found:
            if full not in self._before:
                continue
            wanted = self._wanted.get(full)
            value = self._before[full] if wanted is None else load_json(wanted)
            waits_for = group.waits_for(key, value)
            try:
                if (not waits_for or waits_for in sys.modules) and not group.is_set(group.get(module, key), value):
                    group.set(module, key, value)
            except Exception as error:  # noqa: BLE001  setters of other packages run here
                problems.append(f"{full} of the notebook could not be set: {type(error).__name__}: {error}")
            if wanted is not None:
                awaited.update(each for each in group.owners(key, value) if each not in sys.modules)
        new = tuple(awaited - self._awaited)
        if new:
            self._awaited.update(new)
            self._after_import(new, self._imported)
        return problems

    def _imported(self, module: Any) -> None:
        """Apply what concerns a module that has just been imported."""
        name: str = module.__name__
        groups = {group.name: group for group in GROUPS}
        concerned: list[str] = []
        for full, wanted in self._wanted.items():
            group = groups.get(full.partition("/")[0])
            key = full.partition("/")[2]
            if group is not None and (group.module == name or name in group.owners(key, load_json(wanted))):
                concerned.append(full)
        self._apply(concerned)
