"""The settings of logging: levels of loggers, and handlers that write to the standard streams."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from sgpu_magic.system.process_settings.setting_group import SettingGroup, Values

# packages of the programs that run a notebook, whose loggers are not the user's
_NOTEBOOK_LOGGERS = (
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
# torch's loggers are set by the variable TORCH_LOGS; only a level is sent
_TORCH = "torch"
# packages that add a handler to the root logger when they are imported
_ADD_TO_ROOT = ("absl",)
_ROOT = ""
_STYLES = {"PercentStyle": "%", "StrFormatStyle": "{", "StringTemplateStyle": "$"}
_STREAMS = ("stderr", "stdout", "__stderr__", "__stdout__")


class Logging(SettingGroup):
    """Levels of loggers, and handlers that write to the standard streams, as `basicConfig` sets them.

    The keys are the names of loggers, "" for the root logger, and those of two functions.
    """

    name = module = "logging"
    _disabled_below = "disable()"
    _captures = "captureWarnings()"

    def read(self, module: Any) -> Values:
        found: Values = {}
        for name, logger in self._loggers(module):
            if name.startswith(_TORCH) and logger.level == module.NOTSET:
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
            # the package adds its handlers when it is imported
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
        # setting a level clears the caches of all loggers, which copies their pages in a forked process
        return current == value or (
            isinstance(value, dict) and current == {name: each for name, each in value.items() if name != "package"}
        )

    def waits_for(self, key: str, value: Any) -> str:
        return key.partition(".")[0] if isinstance(value, dict) and value.get("package") else ""

    def owners(self, key: str, value: Any) -> Iterable[str]:
        package = key.partition(".")[0]
        # the package may set levels during its import, which the notebook's code has changed since
        return (package,) if package and "(" not in package else ()

    def left_behind(self, module: Any) -> Iterator[str]:
        for name, logger in self._loggers(module):
            if logger.handlers and name.partition(".")[0] in sys.modules and not name.startswith("__main__"):
                # the package adds its handlers on the ranks too
                continue
            for handler in logger.handlers:
                kind = type(handler)
                by_import = kind.__module__.partition(".")[0] in _ADD_TO_ROOT
                if self._of_handler(module, handler) is None and kind is not module.NullHandler and not by_import:
                    yield f"the {type(handler).__name__} of {f'logger {name}' if name else 'the root logger'}"

    def _loggers(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the loggers that differ from a new logger."""
        root = module.root
        if root.level != module.WARNING or root.handlers or root.disabled:
            yield _ROOT, root
        placeholder = module.PlaceHolder
        for name, logger in list(root.manager.loggerDict.items()):
            if type(logger) is placeholder:
                continue
            is_changed = logger.level or logger.handlers or logger.disabled or not logger.propagate
            if is_changed and name.partition(".")[0] not in _NOTEBOOK_LOGGERS:
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
