"""Executes, in a zygote, what runs have imported, and hides it until ranks import it.

Each import is tried in a child process first. What it changes besides what a rank can repeat rules it out, and so does
a variable that is different on each rank, such as `RANK`, if a module reads it: of such an import, only the modules
that do not depend on that module are executed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire.decoding import decode_msgpack
from sgpu_magic.wire.rank import PausePreload, Preload, Preloaded, ToZygote
from sgpu_magic.worker.cell.edited_modules import forget_installed, is_installed
from sgpu_magic.worker.preload.heavy_imports import heavy_imports
from sgpu_magic.worker.preload.hidden_modules import HiddenModules
from sgpu_magic.worker.preload.import_recorder import ImportRecorder, RecordedImport, dependents_of
from sgpu_magic.worker.preload.process_state import change_since, process_state
from sgpu_magic.worker.process import leaving, rank_context

_TRIAL_S = 300.0
_TRIAL_PRIORITY = 19
# their import needs the run, or changes this process for good
_EXCLUDED = ("mlflow", "sgpu_magic", "pytest")
_KEPT_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# pyarrow's allocator would start a thread; jemalloc itself turns it off in a forked process
_WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class Trial(msgspec.Struct, frozen=True):
    """What became of an import in a process of its own.

    Args:
        modules: The modules to import instead; the import itself if all of it is safe, none if nothing is.
        problem: Why not all of it is executed ahead; "" if it is.
    """

    modules: tuple[str, ...] = ()
    problem: str = ""


class Turn:
    """Waits while the agent's ranks compute. Ends this process when the agent is gone.

    Args:
        link: The connection to the agent.
    """

    def __init__(self, link: StreamConnection[ToZygote]) -> None:
        self._link = link
        self._is_paused = False

    def wait(self) -> None:
        """Return when ranks do not compute."""
        while self._is_paused or self._link.has_message() or select.select([self._link], [], [], 0)[0]:
            self.receive()

    def receive(self) -> None:
        """Handle the agent's next message."""
        received = self._link.receive()
        if received is None:
            os._exit(0)
        if isinstance(received[0], PausePreload):
            self._is_paused = received[0].paused


def preload(order: Preload, link: StreamConnection[ToZygote]) -> Preloaded:
    """Execute imports, hide their modules and return what was done.

    Args:
        order: What to import, and in which context.
        link: The connection to the agent; the process ends when it is closed.

    Returns:
        What was done. Without `roots`, the process can't be used.
    """
    refused: dict[str, str] = {}
    tried = dict(order.tried)
    turn = Turn(link)
    hidden, records = HiddenModules(), list[RecordedImport]()
    before_bytes, done = _resident_bytes(), list[str]()
    with _context_of(order):
        roots = [root for root in order.roots if root.partition(".")[0] not in _EXCLUDED]
        for root in roots:
            if root not in tried:
                trial = _try(root, order, link, turn)
                tried[root] = trial.modules
                if trial.problem:
                    refused[root] = trial.problem
        for root in roots:
            if _resident_bytes() - before_bytes > order.limit_bytes:
                refused[root] = "is left out: the limit of memory (preload_bytes) is reached"
                continue
            state, recorder = process_state(), hidden.recorder(turn.wait)
            with recorder.recording():
                for name in tried[root]:
                    importlib.import_module(name)
            # each import is recorded as if it were the only one
            hidden.hide(recorder.imports)
            if problem := _problem_with(hidden, state):
                # this process can't be used any more: another one leaves this import out
                refused[root], tried[root], done = problem, (), []
                break
            records += recorder.imports.values()
            if tried[root]:
                done.append(root)
    hidden.plan([*done, *(name for root in done for name in tried[root])])
    leaving.forget_registered()
    forget_installed()
    heavy_imports.take()
    rank_context.remember_path_entries()
    return Preloaded(
        roots=tuple(done),
        modules=len(records),
        bytes=max(0, _resident_bytes() - before_bytes),
        reads=tuple(sorted({name for record in records for name in record.reads})),
        reads_directory=any(record.reads_directory for record in records),
        tried={root: modules for root, modules in tried.items() if root in order.roots},
        refused=refused,
    )


@contextlib.contextmanager
def _context_of(order: Preload) -> Generator[None]:
    """Give this process the context of the runs that will use the modules, without what is their ranks' own."""
    environ, path, arguments, directory = dict(os.environ), list(sys.path), list(sys.argv), os.getcwd()
    kept = {name: environ[name] for name in _KEPT_VARIABLES if name in environ}
    _set_environ(_WITHOUT_THREADS | order.environ | kept)
    sys.path[:] = [entry for entry in order.sys_path if is_installed(entry.rstrip(os.sep) + os.sep)]
    sys.argv[:] = [""]
    if order.cwd:
        os.chdir(order.cwd)
    try:
        yield
    finally:
        _set_environ(environ)
        sys.path[:], sys.argv[:] = path, arguments
        os.chdir(directory)


def _set_environ(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _problem_with(hidden: HiddenModules, state: dict[str, object]) -> str:
    """Return why an import can't be executed ahead beside those before it, "" if it can."""
    if hidden.conflict:
        return f"would execute {hidden.conflict} otherwise than an import before it"
    return change_since(state)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- trials


def _try(root: str, order: Preload, link: StreamConnection[ToZygote], turn: Turn) -> Trial:
    """Import a module in a child process and return what of it is safe."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with_parent(parent)
            os.close(reading)
            os.setpriority(os.PRIO_PROCESS, 0, _TRIAL_PRIORITY)
            result = msgspec.msgpack.encode(_import_alone(root, frozenset(order.rank_variables)))
            while result:
                result = result[os.write(writing, result) :]
        except BaseException as error:  # noqa: BLE001  imports may raise anything
            problem = f"raises {type(error).__name__}: {error}"[:500]
            with contextlib.suppress(OSError):
                os.write(writing, msgspec.msgpack.encode(Trial(problem=problem)))
        finally:
            os._exit(0)
    os.close(writing)
    received = bytearray()
    try:
        deadline = time.monotonic() + _TRIAL_S
        while True:
            ready, _, _ = select.select([reading, link], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return Trial(problem=f"takes more than {_TRIAL_S:.0f} s")
            if link in ready:
                turn.receive()
            if reading not in ready:
                continue
            part = os.read(reading, 1 << 16)
            if not part:
                break
            received += part
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        processes.kill_and_reap([pid])
        processes.end_children()
    try:
        return read_trial(bytes(received))
    except msgspec.DecodeError:
        return Trial(problem="ends the process")


def read_trial(data: bytes) -> Trial:
    """Decode what the child process of a trial has sent.

    Raises:
        msgspec.DecodeError: It is not a trial.
    """
    return decode_msgpack(data, type=Trial)


def _import_alone(root: str, rank_variables: frozenset[str]) -> Trial:
    """Import a module in this process, which ends afterwards."""
    with tempfile.TemporaryFile() as printed:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        state = process_state()
        recorder = ImportRecorder()
        with recorder.recording():
            importlib.import_module(root)
        sys.stdout.flush()
        sys.stderr.flush()
        change = change_since(state)
        if not change and os.fstat(printed.fileno()).st_size:
            change = "prints something"
    if change:
        return Trial(problem=change)
    unsafe = {name: why for name, record in recorder.imports.items() if (why := _why_unsafe(record, rank_variables))}
    if not unsafe:
        return Trial((root,))
    dependent = dependents_of(unsafe, recorder.imports)
    safe = [name for name in recorder.imports if name not in dependent]
    first = next(iter(unsafe))
    return Trial(tuple(_outermost(safe, recorder.imports)), f"depends on {first}, which {unsafe[first]}")


def _why_unsafe(record: RecordedImport, rank_variables: frozenset[str]) -> str:
    if record.name.partition(".")[0] in _EXCLUDED:
        return "needs the run"
    if own := record.reads.keys() & rank_variables:
        return f"reads {min(own)}"
    spec: Any = getattr(sys.modules.get(record.name), "__spec__", None)
    if spec is not None and spec.has_location and spec.origin and not is_installed(spec.origin):
        return "is not an installed module"
    return ""


def _outermost(safe: Sequence[str], imports: Mapping[str, RecordedImport]) -> Iterator[str]:
    """Yield the safe modules that no other safe module was the first to import."""
    inside = {name for name in safe if imports[name].importer in imports and imports[name].importer in safe}
    for name in safe:
        if name not in inside and imports[name].was_executed:
            yield name


def freeze() -> None:
    """Keep the collector from touching, and so copying, the modules in every rank."""
    gc.collect()
    gc.freeze()
    processes.collapse_pages()
    processes.unmap_file_pages()
