"""What an import must leave as it was, so that its modules can be executed in the zygote."""

from __future__ import annotations

import asyncio
import builtins
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from sgpu_magic.system import processes
from sgpu_magic.worker.process import leaving


def _open_descriptors() -> frozenset[str]:
    # the listing itself has one open
    return frozenset(name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _signal_handlers() -> tuple[Any, ...]:
    return tuple(signal.getsignal(number) for number in signal.valid_signals())


def _logging() -> tuple[Any, ...]:
    root = logging.getLogger()
    return (tuple(root.handlers), root.level, root.manager.disable, logging.getLoggerClass(), logging.raiseExceptions)


def _torch() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


_PARTS: dict[str, Callable[[], object]] = {
    "starts a thread": processes.thread_count,
    "starts a process": lambda: tuple(processes.child_pids()),
    "leaves a file open": _open_descriptors,
    "initializes CUDA": torch.cuda.is_initialized,
    "handles a signal": _signal_handlers,
    "changes the working directory": os.getcwd,
    "changes the umask": _umask,
    "changes sys.path": lambda: tuple(sys.path),
    "changes sys.argv": lambda: tuple(sys.argv),
    "replaces a hook of the interpreter": lambda: (
        sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, tuple(sys.path_hooks),
        sys.gettrace(), sys.getprofile(), builtins.open, builtins.input, builtins.print,
    ),
    "replaces a standard stream": lambda: (sys.stdin, sys.stdout, sys.stderr),
    "adds a name to the builtins": lambda: frozenset(vars(builtins)),
    "changes limits of the interpreter": lambda: (sys.getrecursionlimit(), sys.getswitchinterval()),
    "changes the garbage collector": lambda: (gc.isenabled(), gc.get_threshold()),
    "changes the root logger": _logging,
    "changes torch's settings": _torch,
    "changes the locale": lambda: locale.setlocale(locale.LC_ALL),
    "changes the time limit of sockets": socket.getdefaulttimeout,
    "changes how multiprocessing starts processes": lambda: multiprocessing.get_start_method(allow_none=True),
    "changes asyncio's policy": lambda: str(vars(asyncio.events).get("_event_loop_policy")),
    "turns on the fault handler": faulthandler.is_enabled,
    "registers a finalizer for the process's exit": leaving.finalizer_count,
}  # fmt: skip


def process_state() -> dict[str, object]:
    """Return the process's state, by what an import does that changes it."""
    return {part: read() for part, read in _PARTS.items()}


def change_since(before: dict[str, object]) -> str:
    """Return what an import has done since the state was read, such as `starts a thread`; "" if nothing."""
    return next((part for part, read in _PARTS.items() if read() != before[part]), "")
