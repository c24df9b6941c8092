"""`--profile`: a trace of torch's profiler around the cell, for chrome://tracing and ui.perfetto.dev."""

# torch's profiler is only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import ctypes
import gzip
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

# 100,000 small operations a second take half a kilobyte of memory each: a longer trace may not fit in the rank's
# memory, and no viewer opens it
LONGEST_S = 20.0

_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"


class CellTrace:
    """Traces the main thread and torch's threads during one cell.

    Args:
        run_dir: The run's directory.
        rank: This rank.
    """

    def __init__(self, run_dir: str, rank: int) -> None:
        self._directory = os.path.join(run_dir, "profile")
        self._path = os.path.join(self._directory, f"rank-{rank}.pt.trace.json.gz")
        self._profiler: Any = None
        self._began = 0.0
        self._over = threading.Event()
        self._stopped_after: float | None = None

    def begin(self) -> None:
        """Start tracing."""
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        # one cycle has nothing to clear, but without the setting torch 2.11 warns that it clears
        self._profiler = profiler.profile(activities=activities, acc_events=True)
        # Kineto logs each of its steps to the rank's stderr unless it starts with this setting
        said = os.environ.setdefault(_LOG_LEVEL, _SILENT)
        try:
            self._profiler.start()
        finally:
            if said == _SILENT:
                del os.environ[_LOG_LEVEL]
        self._began = time.monotonic()
        threading.Thread(target=self._limit, name="sgpu-profile", daemon=True).start()

    def end(self) -> str:
        """Write the trace and return a remark for the user."""
        self._over.set()
        ends_by_term = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if ends_by_term:
            # another rank has failed, or the run was cancelled; the agent gives the rank time to write
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._stop()
            self._write()
        except (OSError, RuntimeError) as error:
            return f"the profiler's trace could not be written: {error}"
        finally:
            if ends_by_term:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        text = f"the profiler's traces are in {self._directory}, one for each rank; ui.perfetto.dev opens them."
        if self._stopped_after is not None:
            text += f" They end after {self._stopped_after:.0f} s: what the cell did later is not in them."
        return text

    def _limit(self) -> None:
        if not self._over.wait(LONGEST_S):
            in_main_thread(self._stop_early)

    def _stop_early(self) -> None:
        if not self._over.is_set():
            self._stopped_after = time.monotonic() - self._began
            self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            self._stopped = profiler

    def _write(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        text, packed = f"{self._path}.json", f"{self._path}.tmp"
        try:
            self._stopped.export_chrome_trace(text)
            # torch compresses at the slowest level: three times as long for a file a tenth smaller
            with open(text, "rb") as plain, gzip.open(packed, "wb", compresslevel=3) as file:
                shutil.copyfileobj(plain, file, 1 << 20)
            os.replace(packed, self._path)
        finally:
            for left in (text, packed):
                with contextlib.suppress(OSError):
                    os.unlink(left)


_waiting: list[Callable[[], None]] = []


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _call_waiting(_: object) -> int:
    while _waiting:
        _waiting.pop()()
    return 0


def in_main_thread(call: Callable[[], None]) -> None:
    """Let the main thread call `call` between two of its bytecode instructions.

    A profiler must be stopped in the thread that started it, and a signal would interrupt the cell's system calls.
    """
    _waiting.append(call)
    ctypes.pythonapi.Py_AddPendingCall(_call_waiting, None)
