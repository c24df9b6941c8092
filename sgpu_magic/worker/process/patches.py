"""Changes to other packages in a rank, and in the processes that it starts.

Modules that would take seconds to import are changed when the rank imports them.

multiprocessing pickles the notebook's classes and functions by reference to `__main__`, which spawn and forkserver
children don't have: in a plain notebook, a DataLoader over a Dataset defined there fails (pytorch#51344). Here they are
pickled by value. Those of a script are not: such children import its file, as they do outside of a rank.

Where cuda is mapped to the CPU (see `cuda_on_cpu`), a forked process has the rank's mapping. Other children get
preparation data from multiprocessing before they import the main module. Reading a `_Mapping` in this data maps cuda
there. All these children import this module, so it imports little.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Execute = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds some modules through the finders after it, and lets `execute` execute them.

    Attributes:
        names: These modules.
    """

    def __init__(self, names: Sequence[str], execute: Callable[[Execute, ModuleType], None]) -> None:
        self.names = names
        self._execute = execute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        at = next((at for at, finder in enumerate(sys.meta_path) if finder is self), len(sys.meta_path))
        for finder in sys.meta_path[at + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if loader is not None:
                    # set on the loader object, which serves this import only
                    loader.exec_module = functools.partial(self._execute, loader.exec_module)
                return spec
        return None


def around_import(names: Sequence[str], execute: Callable[[Execute, ModuleType], None]) -> None:
    """Call `execute` with the function that executes a module, and the module, when one of these is imported."""
    sys.meta_path.insert(0, _Finder(names, execute))


def after_import(names: Sequence[str], change: Callable[[Any], None]) -> None:
    """Call `change` with each of these modules after its import; at once with those that are imported already."""
    for name in names:
        if name in sys.modules:
            change(sys.modules[name])

    def execute(original: Execute, module: ModuleType) -> None:
        original(module)
        change(module)

    around_import(names, execute)


def refuse_launchers() -> None:
    """Make accelerate's `notebook_launcher` raise an error, instead of starting processes in each rank."""
    after_import(("accelerate.launchers",), _refuse_notebook_launcher)


def _refuse_notebook_launcher(module: Any) -> None:
    @functools.wraps(module.notebook_launcher)
    def notebook_launcher(function: Any = None, *args: object, **kwargs: object) -> None:
        name = getattr(function, "__name__", "function")
        raise RuntimeError(
            f"notebook_launcher() on rank {os.environ.get('RANK', '?')}: the run's {os.environ.get('WORLD_SIZE', '')} "
            f"ranks are there already, started as torchrun starts them. Call the function itself: {name}(...)."
        )

    module.notebook_launcher = notebook_launcher


def apply_time_limits() -> None:
    """Let frameworks apply the time limit of collectives that user code gives them.

    They pass it to `init_process_group`, which they skip where the group exists, as it does on a rank. The limit is
    accelerate's `InitProcessGroupKwargs(timeout=...)` and `ddp_timeout` of transformers, and `timeout` of Lightning's
    strategies.
    """
    after_import(("accelerate.state",), lambda module: _apply_time_limit(module.PartialState, "__init__"))
    after_import(
        ("lightning.fabric.utilities.distributed", "lightning_fabric.utilities.distributed"),
        lambda module: _apply_time_limit(module, "_init_dist_connection"),
    )


def _apply_time_limit(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        existed = dist.is_initialized()
        result = original(*args, **kwargs)
        if existed and kwargs.get("timeout") is not None and dist.is_initialized():
            dist.init_process_group(timeout=kwargs["timeout"])
        return result

    setattr(owner, name, call)
