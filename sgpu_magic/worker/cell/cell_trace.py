"""Torch's profiler around a cell, for `--profile`."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import threading
import time
from typing import Any

import torch

from sgpu_magic.worker.process import user_code

# at 100,000 small operations a second, each of which takes half a kilobyte, a longer trace may not fit in the rank's
# memory, and no viewer opens it
LONGEST_TRACE_S = 20.0
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"


class CellTrace:
    """A trace of torch's profiler, for chrome://tracing and ui.perfetto.dev.

    It records the main thread and torch's threads from the creation of this object until `end`.

    Args:
        run_dir: The run's directory.
        rank: This rank.
    """

    def __init__(self, run_dir: str, rank: int) -> None:
        from torch import profiler

        self._directory = os.path.join(run_dir, "profile")
        self._name = f"rank-{rank}.pt.trace.json.gz"
        self._ended = threading.Event()
        self._stopped_after: float | None = None
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        # has no effect in a single cycle, but without it torch 2.11 warns that events are cleared between cycles
        self._profiler: Any = profiler.profile(activities=activities, acc_events=True)
        # Kineto logs each of its steps to the rank's stderr unless it starts with this setting
        level = os.environ.setdefault(_LOG_LEVEL, _SILENT)
        try:
            self._profiler.start()
        finally:
            if level == _SILENT:
                del os.environ[_LOG_LEVEL]
        self._began = time.monotonic()
        threading.Thread(target=self._limit, name="sgpu-profile", daemon=True).start()

    def end(self) -> str:
        """Write the trace and return a remark for the user."""
        self._ended.set()
        try:
            if self._stopped_after is None:
                self._profiler.stop()
            self._write()
        except (OSError, RuntimeError) as error:
            return f"the profiler's trace could not be written: {error}"
        text = f"the profiler's traces are in {self._directory}, one for each rank; ui.perfetto.dev opens them."
        if self._stopped_after is not None:
            text += f" They end after {self._stopped_after:.0f} s: what the cell did later is not in them."
        return text

    def _limit(self) -> None:
        if not self._ended.wait(LONGEST_TRACE_S):
            user_code.in_main_thread(self._stop_early)

    def _stop_early(self) -> None:
        if not self._ended.is_set():
            self._stopped_after = time.monotonic() - self._began
            self._profiler.stop()

    def _write(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        # hidden, since MLflow's writer may list the directory meanwhile
        text, packed = (os.path.join(self._directory, f".{self._name}.{kind}") for kind in ("json", "tmp"))
        try:
            self._profiler.export_chrome_trace(text)
            # torch compresses at the slowest level: three times as long for a file a tenth smaller
            with open(text, "rb") as plain, gzip.open(packed, "wb", compresslevel=3) as file:
                shutil.copyfileobj(plain, file, 1 << 20)
            os.replace(packed, os.path.join(self._directory, self._name))
        finally:
            for left in (text, packed):
                with contextlib.suppress(OSError):
                    os.unlink(left)
