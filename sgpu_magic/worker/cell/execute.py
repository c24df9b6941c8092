"""One cell in one rank: run it, describe how it failed."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import re
import socket
import time
import types

import torch
import torch.distributed as dist
from IPython.core.inputtransformer2 import leading_indent

from sgpu_magic.errors import EnvironmentFailed, SerializationError
from sgpu_magic.payload import unpack
from sgpu_magic.wire.failures import Failure, RankMemory
from sgpu_magic.wire.rank import Execute
from sgpu_magic.wire.run import CellSource
from sgpu_magic.wire.states import FailureKind
from sgpu_magic.worker.cell import asking, failures, memory
from sgpu_magic.worker.cell.results import pack_names
from sgpu_magic.worker.cell.shell import RankShell, hook_of

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def warm_up(shell: RankShell) -> None:
    """Run a cell and format a traceback once in the zygote: the first of each costs 10 and 140 ms."""
    for source in ("1 + 1", "def _f():\n    raise ValueError('warm')\n_f()"):
        shell.run_cell(source, store_history=False)
    shell.reset(new_session=True)
    # `reset` takes these too, and multiprocessing reads them
    shell.user_ns.update(dict.fromkeys(("__spec__", "__loader__", "__package__", "__doc__")))
    shell.begin_cell(is_first=True)
    # multiprocessing asks for it before it starts a child that is not forked
    shell.user_module.__spec__ = None


def rehearse(shell: RankShell) -> None:
    """Take the way of a cell once while there is time: a fork's first touch of each page copies it.

    Saves 5 ms of the 10 that a standby rank's first cell takes on a small machine. Leaves nothing in the namespace.
    """
    environ = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    before = set(shell.user_ns)
    shell.run_cell("1 + 1", store_history=False)
    for name in set(shell.user_ns) - before:
        del shell.user_ns[name]
    hook = hook_of(shell)
    hook.last_value, hook.last_text = None, ""
    key = bytes(32)
    packed = pack_names({}, 2, 0, key)
    unpack.unpack(bytearray(packed.to_bytes()), packed.layout, key, {})
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def source_of(cell: CellSource) -> str:
    """The cell with its magic's line as a comment, so that line numbers are the editor's.

    A body that begins with a cell magic of its own must stay in front to be recognised.
    """
    lines = cell.body.splitlines(keepends=True)
    is_indented = next((line for line in lines if line.strip()), "")[:1].isspace()
    # as IPython does with a plain cell
    body = "".join(leading_indent(lines)) if is_indented else cell.body
    if not cell.magic_line or body.lstrip().startswith("%%"):
        return body
    return f"# {cell.magic_line}\n{body}"


def run_cell(shell: RankShell, order: Execute) -> tuple[BaseException | None, float]:
    """Run the cell in the shell's namespace; return what it raised, and its time in seconds."""
    hook = hook_of(shell)
    hook.last_value = None
    hook.source = order.cell.body
    shell.execution_count = order.cell.execution_count or 1
    # of the notebook's earlier cells, and in a session of the rank's own
    shell.compile.flags |= order.cell.future_flags
    begin = time.perf_counter()
    outcome = shell.run_cell(source_of(order.cell), store_history=False)
    seconds = time.perf_counter() - begin
    error = outcome.error_in_exec if outcome.error_before_exec is None else outcome.error_before_exec
    if shell.shown is not None:
        error = shell.shown.error
    return (None if error is not None and asking.is_exit(error) else error), seconds


def describe(error: BaseException, shell: RankShell, rank: int) -> Failure:
    """Describe how a cell failed: the traceback as IPython draws it, the cell's line, what the rank was in.

    Of an allocation that failed, what held the memory; of a rank that its peers or the user ended, how much it held.
    """
    shown = shell.shown
    if shown is None or shown.error is not error:
        shown = shell.shown = failures.look_at(error, shell.whole)
    message = failures.message_of(shown)
    ansi = "\n".join(shown.lines)
    text = shell.whole.cut(_ANSI.sub("", ansi), failures.TRACEBACK_CHARS, "traceback")
    kind = FailureKind.USER_CODE
    if asking.is_a(error, SerializationError):
        kind = FailureKind.SERIALIZATION
    elif asking.is_a(error, EnvironmentFailed):
        kind = FailureKind.ENVIRONMENT
    entry = asking.traceback_of(error)
    line, where = _position(entry, shell)
    if line is None:
        line, _ = _position(shell.unwound, shell)
    out_of_memory = memory.is_out_of_memory(error, message)
    is_consequence = failures.is_peer_lost(error, shown.message)
    held: RankMemory | None = None
    if out_of_memory:
        held = memory.take_stock(error, entry, shell)
    elif is_consequence or shell.released or asking.is_a(error, KeyboardInterrupt):
        held = memory.measure("cuda" if torch.cuda.is_initialized() else "cpu")
    return Failure(
        kind=kind,
        message=message,
        rank=rank,
        host=socket.gethostname(),
        at=shell.failed_at or time.time(),
        type_name=shown.type_name,
        traceback_text=text,
        traceback_ansi=shell.whole.cut(ansi, failures.ANSI_CHARS, ""),
        line=line,
        where=where,
        is_consequence=is_consequence,
        out_of_memory=out_of_memory,
        memory=held,
    )


def _position(traceback: types.TracebackType | None, shell: RankShell) -> tuple[int | None, str]:
    """The last line of a notebook cell on the stack, and the torch function entered below it."""
    line: int | None = None
    where = ""
    cells = shell.compile._filename_map  # pyright: ignore[reportPrivateUsage]
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename in cells:
            line, where = traceback.tb_lineno, ""
        elif not where and f"{os.sep}torch{os.sep}" in code.co_filename and code.co_name != "wrapper":
            where = code.co_name.strip("_")
        traceback = traceback.tb_next
    return line, where
