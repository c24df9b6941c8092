"""The zygote: a single-threaded process that has imported torch and IPython once and forks ranks.

Started by the agent as `python -m sgpu_magic.worker.process.zygote <fd>` with the notebook's interpreter. It never
touches CUDA or NVML, never runs a parallel operation and never starts a thread, so a fork of it is as good as a fresh
process. It counts its threads before each fork and refuses when there is more than one.

It is the ranks' parent and subreaper: it reports each child's exit status. When the agent is gone, it kills every
descendant and exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
import weakref
from types import FrameType
from typing import Any

from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import Link
from sgpu_magic.wire import codec
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION
from sgpu_magic.wire.rank import Exited, Fork, Forked, ForkRefused, ToZygote, ZygoteFailed, ZygoteReady
from sgpu_magic.worker.process import terminal

# getrusage(2): kilobytes, on macOS bytes
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    link = Link(socket.socket(fileno=int(sys.argv[1])), codec.to_zygote)
    processes.become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # torch's import makes a quarter of a million objects, and nearly all stay: looking through them takes 0.1 s
    gc.disable()
    try:
        torch_version = _preload()
    except Exception as error:
        link.send(ZygoteFailed(message=f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error
    # objects made so far never die: frozen, the collector does not touch, and so copy, their pages in every rank;
    # what could be collected was, when `warm_up` reset the shell
    gc.freeze()
    gc.enable()
    processes.collapse_pages()
    link.send(ZygoteReady(pid=os.getpid(), torch_version=torch_version, protocol_version=PROTOCOL_VERSION))
    processes.unmap_file_pages()
    # a ConnectionError means that the agent is gone
    with contextlib.suppress(ConnectionError):
        _serve(link)
    processes.kill_descendants()
    os._exit(0)


def _preload() -> str:
    """Import torch and IPython and create the shell once for all ranks. Returns torch's version.

    Starts no thread: numpy's BLAS would start a thread pool at import, so it is limited to one thread until the fork.
    `rank_context.set_threads` raises the limit in the rank.
    """
    from sgpu_magic.functions import compat

    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        # every rank needs these at once; imported here they are shared
        for name in ("numpy.random", "threadpoolctl", "pdb", "sgpu_magic.worker.process.rank"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        from sgpu_magic.tracking import in_rank
        from sgpu_magic.worker.cell import diagnosis, edited_modules, results, shell, widgets
        from sgpu_magic.worker.group import rendezvous
        from sgpu_magic.worker.process import patches, position, rank_context

        position.record_collectives()
        rendezvous.accept_second_init()
        rendezvous.accept_second_rendezvous()
        patches.teach_multiprocessing()
        patches.refuse_launchers()
        patches.around_import(("mlflow",), in_rank.around_import)
        edited_modules.note_imports()
        diagnosis.count_optimizer_steps()
        widgets.install()
    compat.install()
    # outside `catch_warnings`: the filters that the shell sets stay, as in the notebook
    rank_shell = shell.create()
    rank_context.share_store(rank_shell)
    shell.warm_up(rank_shell)
    results.warm_up_questions(rank_shell)
    codec.to_rank.prepare()
    rank_context.remember_path_entries()
    _leave_finalizers_out_of_exits()
    return str(torch.__version__)


def _leave_finalizers_out_of_exits() -> None:
    """Keep ranks from finalizing the zygote's objects at exit: torch's operator libraries would copy 28 MB for it."""
    registry: dict[Any, object] = vars(weakref.finalize)["_registry"]
    for made_here in list(registry):
        made_here.atexit = False


def _serve(link: Link[ToZygote]) -> None:
    child_ended, wakeup = socket.socketpair()
    child_ended.setblocking(False)
    wakeup.setblocking(False)
    signal.signal(signal.SIGCHLD, _wake)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    inherited = (child_ended, wakeup)
    while True:
        ready, _, _ = select.select([link, child_ended], [], [])
        if child_ended in ready:
            child_ended.recv(4096)
            _report_ended(link)
        while link in ready:
            received = link.receive()
            if received is None:
                return
            _fork(link, received[0], inherited)
            if not link.has_message():
                break


def _wake(signum: int, stack: FrameType | None) -> None:
    """Handle SIGCHLD: without a Python handler no byte is written to the wakeup descriptor."""


def _report_ended(link: Link[ToZygote]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            peak = usage.ru_maxrss * _MAXRSS_UNIT
            link.send(Exited(pid=pid, status=os.waitstatus_to_exitcode(status), peak_bytes=peak))


def _fork(link: Link[ToZygote], order: Fork, inherited: tuple[socket.socket, ...]) -> None:
    descriptors = link.take_descriptors(4 if order.store_path else 5)
    try:
        threads = processes.thread_count()
        if threads > 1:
            raise OSError(
                f"the zygote has {threads} threads, so forking it could hang; a package starts them at import"
            )
        pid = os.fork()
    except OSError as error:
        reply = ForkRefused(group_id=order.group_id, rank=order.rank, message=str(error))
    else:
        if pid == 0:
            _become_rank(link, order, descriptors, inherited)
        reply = Forked(group_id=order.group_id, rank=order.rank, pid=pid)
    for descriptor in descriptors:
        os.close(descriptor)
    link.send(reply)


def _become_rank(
    link: Link[ToZygote], order: Fork, descriptors: list[int], inherited: tuple[socket.socket, ...]
) -> None:
    """Turn the forked child into a rank. Never returns."""
    parent = os.getppid()
    status = 1
    try:
        processes.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
