"""The zygote: a single-threaded process that has imported torch and IPython once and forks ranks.

Started by the agent as `python -m sgpu_magic.worker.process.zygote <fd>` with the notebook's interpreter. It never
touches CUDA or NVML, never runs a parallel operation and never starts a thread, so a fork of it is as good as a fresh
process. It counts its threads before each fork and refuses when there is more than one.

It is the ranks' parent: it reports each one's exit status, and ends what it has left behind. A rank is a subreaper (see
`orphans`), and so is the zygote, so every process that a rank has started, however detached, is below the rank until
the rank ends, and then a child of the zygote. When the agent is gone, it kills every descendant and exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from types import FrameType

from sgpu_magic import extensions
from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION
from sgpu_magic.wire.rank import (
    DescendantsEnded,
    Exited,
    Fork,
    Forked,
    ForkRefused,
    Preload,
    ToZygote,
    ZygoteFailed,
    ZygoteReady,
)
from sgpu_magic.worker.process import orphans, terminal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may reach all processes of a service at once. The agent alone handles them: it lets ranks end."""

# getrusage(2): kilobytes, on macOS bytes
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
# helpers such as multiprocessing's resource tracker clean up and exit by themselves once their rank is gone
_END_BY_THEMSELVES_S = 0.5
# a process that can't be killed does not keep a run from ending
_END_S = 5.0
_POLL_S = 0.01
_MOST_NAMED = 10


def main() -> None:
    link = StreamConnection(socket.socket(fileno=int(sys.argv[1])), codec.to_zygote)
    processes.become_subreaper()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # torch's import creates a quarter of a million objects, nearly all of them permanent: collections take 0.1 s
    gc.disable()
    try:
        torch_version = _preload()
    except Exception as error:
        link.send(ZygoteFailed(message=f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error
    # objects created so far are permanent: once they are frozen, the collector does not touch, and so copy, their pages
    # in every rank; garbage was collected when `warm_up` reset the shell
    gc.freeze()
    gc.enable()
    processes.collapse_pages()
    link.send(ZygoteReady(pid=os.getpid(), torch_version=torch_version, protocol_version=PROTOCOL_VERSION))
    processes.unmap_file_pages()
    # a ConnectionError means that the agent is gone
    with contextlib.suppress(ConnectionError):
        _Ranks(link).serve()
    processes.end_children()
    os._exit(0)


def _preload() -> str:
    """Import torch and IPython and create the shell once for all ranks. Returns torch's version.

    Starts no thread: numpy's BLAS would start a thread pool at import, so it is limited to one thread until the fork.
    `rank_context.set_threads` raises the limit in the rank.
    """
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        # every rank needs these at once; imported here they are shared
        for name in ("numpy.random", "threadpoolctl", "pdb", "sgpu_magic.worker.process.rank"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        from sgpu_magic.worker.cell import edited_modules, event_loop, lone_training, results, shell, widgets
        from sgpu_magic.worker.group import local_names, rendezvous
        from sgpu_magic.worker.preload import heavy_imports
        from sgpu_magic.worker.process import leaving, notebook_classes, patches, position, rank_context

        position.record_collectives()
        rendezvous.accept_second_init()
        rendezvous.accept_second_rendezvous()
        local_names.count_by_members()
        orphans.install()
        notebook_classes.teach_multiprocessing()
        patches.refuse_launchers()
        event_loop.run_other_loops()
        patches.apply_time_limits()
        patches.around_import(("mlflow",), extensions.tracking_in_rank().around_import)
        edited_modules.note_imports()
        sys.meta_path.insert(0, heavy_imports.heavy_imports)
        lone_training.count_optimizer_steps()
        widgets.install()
    extensions.databricks_names().install()
    # outside `catch_warnings`: the filters that the shell sets stay, as in the notebook
    rank_shell = shell.create()
    rank_context.share_store(rank_shell)
    shell.warm_up(rank_shell)
    terminal.refuse_input(rank_shell)
    results.warm_up_questions(rank_shell)
    codec.to_rank.prepare()
    rank_context.remember_path_entries()
    atexit.unregister(rank_shell.atexit_operations)
    leaving.begin_to_count()
    return str(torch.__version__)


def _wake(signum: int, stack: FrameType | None) -> None:
    """Handle SIGCHLD: without a Python handler no byte is written to the wakeup descriptor."""


class _Ranks:
    """Forks ranks, reports their ends, and ends the processes that they leave behind.

    Args:
        link: The connection to the agent.
    """

    def __init__(self, link: StreamConnection[ToZygote]) -> None:
        self._link = link
        self._living: set[int] = set()
        # dead ranks whose descendants are being ended, and when these are killed and given up
        self._leaving: list[int] = []
        self._kill_at = self._give_up_at = 0.0
        self._killed: list[str] = []
        # orphans that can't be killed
        self._stuck: set[int] = set()

    def serve(self) -> None:
        """Fork ranks as ordered, until the agent closes the connection."""
        link = self._link
        child_ended, wakeup = socket.socketpair()
        child_ended.setblocking(False)
        wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        inherited = (child_ended, wakeup)
        while True:
            ready, _, _ = select.select([link, child_ended], [], [], _POLL_S if self._leaving else None)
            if child_ended in ready:
                child_ended.recv(4096)
                self._report_ended()
            if self._leaving:
                self._end_descendants()
            while link in ready:
                received = link.receive()
                if received is None:
                    return
                match received[0]:
                    case Preload() as order:
                        self._preload(order)
                    case Fork() as order:
                        self._fork(order, inherited)
                    case _:
                        pass
                if not link.has_message():
                    break

    def _preload(self, order: Preload) -> None:
        """Execute imports ahead."""
        from sgpu_magic.worker.preload import preloading

        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            done = preloading.preload(order, self._link)
        except Exception as error:
            self._link.send(ZygoteFailed(message=f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from error
        preloading.freeze()
        signal.signal(signal.SIGCHLD, _wake)
        self._link.send(done)

    def _report_ended(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._stuck.discard(pid)
                if pid not in self._living:
                    continue
                self._living.remove(pid)
                # its descendants were reparented to this process before it could be reaped
                leaves = bool(self._orphans())
                if leaves:
                    self._leaving.append(pid)
                    self._kill_at = time.monotonic() + _END_BY_THEMSELVES_S
                    self._give_up_at = self._kill_at + _END_S
                peak, code = usage.ru_maxrss * _MAXRSS_UNIT, os.waitstatus_to_exitcode(status)
                self._link.send(Exited(pid=pid, status=code, peak_bytes=peak, descendants=leaves))

    def _orphans(self) -> list[int]:
        return [pid for pid in processes.child_pids() if pid not in self._living and pid not in self._stuck]

    def _end_descendants(self) -> None:
        """End what dead ranks have left: first by themselves, then by SIGKILL, until none is left."""
        found = self._orphans()
        now = time.monotonic()
        if found and now > self._kill_at:
            self._killed += map(processes.command_of, found[: _MOST_NAMED - len(self._killed)])
            left = processes.kill_and_reap(found, self._living)
            if now > self._give_up_at or (left and not any(map(processes.may_signal, left))):
                self._stuck |= set(left)
            # the children of those that have just ended are found now
            found = self._orphans()
        if found:
            return
        stuck = tuple(map(processes.command_of, self._stuck))
        for pid in self._leaving:
            self._link.send(DescendantsEnded(pid=pid, killed=tuple(self._killed), stuck=stuck))
        self._leaving, self._killed = [], []

    def _fork(self, order: Fork, inherited: tuple[socket.socket, ...]) -> None:
        link = self._link
        descriptors = link.take_descriptors(4 if order.store_path else 5)
        try:
            threads = processes.thread_count()
            if threads > 1:
                raise OSError(
                    f"the zygote has {threads} threads, so forking it could hang; a package starts them at import"
                )
            # freeze objects created since then too: the rank's first collection would copy 1.3 MB
            gc.freeze()
            pid = os.fork()
        except OSError as error:
            reply = ForkRefused(group_id=order.group_id, rank=order.rank, message=str(error))
        else:
            if pid == 0:
                _become_rank(link, order, descriptors, inherited)
            self._living.add(pid)
            reply = Forked(group_id=order.group_id, rank=order.rank, pid=pid)
        for descriptor in descriptors:
            os.close(descriptor)
        link.send(reply)


def _become_rank(
    link: StreamConnection[ToZygote], order: Fork, descriptors: list[int], inherited: tuple[socket.socket, ...]
) -> None:
    """Turn the forked child into a rank. Never returns."""
    parent = os.getppid()
    status = 1
    try:
        processes.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        orphans.adopt()
        link.close()
        for sock in inherited:
            sock.close()
        from sgpu_magic.worker.process import rank

        status = rank.live(order, descriptors)
    except Exception:  # noqa: BLE001  a process's entry: an internal error goes to the rank's log
        traceback.print_exc()
        terminal.flush()
    finally:
        # never the interpreter's own exit, which takes 0.4 s after an import of torch
        os._exit(status)


if __name__ == "__main__":
    main()
