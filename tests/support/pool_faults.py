"""Faults in the pool service: a method that raises once, when the test arms it.

The service runs in its own process, so a `sitecustomize` on its PYTHONPATH plants them. A fault is armed by a file of
the callback's name, which holds the id of the run whose call raises, or nothing for any call.
"""

from __future__ import annotations

from pathlib import Path

from planted_faults import Callback
from waiting import eventually

_SITE = """
import functools, importlib.abc, importlib.util, os, sys
from pathlib import Path

FOLDER = Path(__file__).parent
PLANTS = {plants!r}


def fault(owner, name, message, path):
    old = getattr(owner, name)

    @functools.wraps(old)
    def new(*args, **named):
        try:
            wanted = path.read_text()
        except OSError:
            return old(*args, **named)
        if message and not any(type(arg).__name__ == message for arg in args[1:]):
            return old(*args, **named)
        if not wanted or any(wanted == getattr(arg, "run_id", arg) for arg in args[1:]):
            path.unlink()
            raise RuntimeError("planted")
        return old(*args, **named)

    setattr(owner, name, new)


class Planter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PLANTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def plant(module):
            execute(module)
            for owner, method, message, file in PLANTS[name]:
                fault(getattr(module, owner), method, message, FOLDER / file)

        spec.loader.exec_module = plant
        return spec


sys.meta_path.insert(0, Planter())
"""


class Plants:
    """Methods of the pool service that can be made to raise.

    Args:
        folder: An empty folder, to be put on the home's PYTHONPATH.
        callbacks: The methods, and with which messages their calls raise.

    Raises:
        ValueError: A callback is to raise after its call.
    """

    def __init__(self, folder: Path, callbacks: list[Callback]) -> None:
        self.folder = folder
        plants: dict[str, list[tuple[str, str, str, str]]] = {}
        for callback in callbacks:
            if callback.after:
                raise ValueError(f"{callback}: faults of the pool strike before a call")
            owner, method = callback.function.__qualname__.split(".")
            message = "" if callback.message is None else callback.message.__name__
            planted = (owner, method, message, self._file(callback).name)
            plants.setdefault(callback.function.__module__, []).append(planted)
        (folder / "sitecustomize.py").write_text(_SITE.format(plants=plants))

    def arm(self, callback: Callback, run_id: str = "") -> None:
        """Make the next call raise, or the next one for a run."""
        path = self._file(callback)
        path.with_suffix(".part").write_text(run_id)
        path.with_suffix(".part").replace(path)

    def struck(self, callback: Callback) -> None:
        """Wait until the fault has been raised."""
        path = self._file(callback)
        eventually(lambda: not path.exists(), 10, f"{callback} was not called")

    def _file(self, callback: Callback) -> Path:
        return self.folder / str(callback).partition(":")[2]
