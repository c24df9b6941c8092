"""A rank that fails only once all others wait for it, so that the report about them is deterministic."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kernels import Cell, Kernel, Reply
from waiting import eventually

from sgpu_magic.cli.runs import of_one
from sgpu_magic.config import load_settings
from sgpu_magic.errors import RunUnknown, UsageError


class Culprit:
    """A cell in which one rank fails when the test says so.

    Args:
        kernel: Its kernel.
        name: The run's name.
    """

    def __init__(self, kernel: Kernel, name: str) -> None:
        self._kernel = kernel
        self._name = name
        self._word: Path = kernel.home.work / f"{name}.word"
        self._cell: Cell | None = None
        self.waits = f"while not __import__('os').path.exists({str(self._word)!r}): __import__('time').sleep(0.01)"
        """The line before its failure."""

    def start(self, options: str, body: str) -> None:
        self._cell = self._kernel.start(f"%%distributed {options} --name {self._name}\n{body}")

    def fails(self, when: str) -> Reply:
        """Make the rank fail once the run's stacks contain `when`; return the cell's reply, timed from then on."""
        home = self._kernel.home
        run_id = eventually(lambda: home.run_named(self._name), 20, "it does not start")
        settings = load_settings(home.environ)

        def reported() -> str:
            # it may still be queued
            with contextlib.suppress(RunUnknown, UsageError):
                return of_one(settings, "stacks", run_id)
            return ""

        eventually(lambda: when in reported(), 20, lambda: f"not yet {when!r}: {reported()}")
        self._word.touch()
        struck = time.monotonic()
        assert self._cell is not None
        reply = self._cell.wait()
        reply.seconds = time.monotonic() - struck
        return reply
