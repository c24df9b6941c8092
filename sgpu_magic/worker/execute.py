"""One cell in one rank: run it, pack what it returns, describe how it failed."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import re
import socket
import sys
import time
import types
from collections.abc import Sequence

from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.payload import unpack
from sgpu_magic.payload.pack import Packed, pack_object
from sgpu_magic.protocol.node_messages import Execute
from sgpu_magic.protocol.records import Failure, OutputName
from sgpu_magic.protocol.states import FailureKind
from sgpu_magic.worker.shell import RankDisplayHook, RankShell, is_peer_lost, source_of

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_VALUE_LIMIT_BYTES = 100_000_000


def warm_up(shell: RankShell) -> None:
    """Run a cell and format a traceback once in the zygote: the first of each costs 10 and 140 ms."""
    for source in ("1 + 1", "def _f():\n    raise ValueError('warm')\n_f()"):
        shell.run_cell(source, store_history=False)
    shell.reset(new_session=True)
    # `reset` takes these too, and multiprocessing reads them
    shell.user_ns.update(dict.fromkeys(("__spec__", "__loader__", "__package__", "__doc__")))
    shell.traceback_lines = []
    # multiprocessing asks for it before it starts a child that is not forked
    shell.user_module.__spec__ = None


def rehearse(shell: RankShell) -> None:
    """Take the way of a cell once while there is time: a fork's first touch of each page copies it.

    Saves 5 ms of the 10 that a standby rank's first cell takes on a small machine. Leaves nothing in the namespace.
    """
    import torch
    import torch.distributed as dist

    environ = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    before = set(shell.user_ns)
    shell.run_cell("1 + 1", store_history=False)
    for name in set(shell.user_ns) - before:
        del shell.user_ns[name]
    hook = assert_hook(shell.displayhook)
    hook.last_value, hook.last_text = None, ""
    key = bytes(32)
    packed = _pack({}, 2, 0, key)
    unpack.unpack(bytearray(packed.to_bytes()), packed.layout, key, {})
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


class CellOutcome:
    """What came of a cell.

    Args:
        failure: None when the cell ran through.
        error: The exception it raised.
        seconds: Its time.
    """

    def __init__(self, failure: Failure | None, error: BaseException | None, seconds: float) -> None:
        self.failure = failure
        self.error = error
        self.seconds = seconds


def run_cell(shell: RankShell, order: Execute) -> CellOutcome:
    """Run the cell in the shell's namespace."""
    hook = shell.displayhook
    assert_hook(hook).last_value = None
    assert_hook(hook).source = order.cell.body
    shell.execution_count = order.cell.execution_count or 1
    begin = time.perf_counter()
    outcome = shell.run_cell(source_of(order.cell), store_history=False)
    seconds = time.perf_counter() - begin
    error = outcome.error_before_exec or outcome.error_in_exec
    if isinstance(error, SystemExit) and not error.code:
        error = None
    if error is None:
        return CellOutcome(None, None, seconds)
    return CellOutcome(describe(error, shell, int(order.rank_variables["RANK"])), error, seconds)


def assert_hook(hook: object) -> RankDisplayHook:
    """Narrow the shell's display hook to ours."""
    if not isinstance(hook, RankDisplayHook):
        raise TypeError(f"the rank's display hook was replaced by {type(hook).__name__}")
    return hook


def pack_result(shell: RankShell, outputs: Sequence[OutputName], rank: int, key: bytes) -> tuple[Packed | None, str]:
    """Pack the names of `--out` that this rank returns and the last expression's value.

    Returns:
        The packed result, None when there is nothing to return, and why the value stays here ("" when it does not).

    Raises:
        UsageError: The cell ended without setting a name of `--out`.
        SerializationError: A name of `--out` can't be pickled.
    """
    names: dict[str, object] = {}
    for output in outputs:
        if output.all_ranks or rank == 0:
            if output.name not in shell.user_ns:
                raise UsageError(
                    f"the cell ended on rank {rank} without setting `{output.name}`, which --out names. Set it in the "
                    "cell on this rank too, or take it out of --out."
                )
            names[output.name] = shell.user_ns[output.name]
    value = assert_hook(shell.displayhook).last_value
    if not names and value is None:
        return None, ""
    if value is None:
        return _pack(names, None, rank, key), ""
    try:
        packed = _pack(names, value, rank, key)
    except SerializationError as error:
        return (_pack(names, None, rank, key) if names else None), error.message
    if not names and packed.total_bytes > _VALUE_LIMIT_BYTES:
        return None, f"it has {packed.total_bytes / 1e6:,.0f} MB: name it in --out to get it"
    return packed, ""


def _pack(names: dict[str, object], value: object, rank: int, key: bytes) -> Packed:
    namespace = sys.modules["__main__"].__dict__
    try:
        return pack_object({"names": names, "value": value}, namespace, key)
    except SerializationError:
        for name, single in names.items():
            try:
                pack_object(single, namespace, key)
            except SerializationError as error:
                raise SerializationError(f"`{name}` of --out can't leave rank {rank}: {error.message}") from None
        raise


def pack_exception(error: BaseException, key: bytes) -> Packed | None:
    """Pack the exception itself, None when it can't be pickled: its type, message and traceback travel anyway."""
    try:
        return pack_object(error, sys.modules["__main__"].__dict__, key)
    except Exception:  # noqa: BLE001  user code's __reduce__ may raise anything; the failure record tells the story
        return None


def describe(error: BaseException, shell: RankShell, rank: int) -> Failure:
    """Describe how a cell failed: the traceback as IPython draws it, the cell's line, what the rank was in."""
    ansi = "\n".join(shell.traceback_lines)
    kind = FailureKind.USER_CODE
    if isinstance(error, SerializationError):
        kind = FailureKind.SERIALIZATION
    line, where = _position(error.__traceback__, shell)
    return Failure(
        kind=kind,
        message=str(error),
        rank=rank,
        host=socket.gethostname(),
        at=shell.failed_at or time.time(),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        traceback_text=_ANSI.sub("", ansi),
        traceback_ansi=ansi,
        line=line,
        where=where,
        is_consequence=is_peer_lost(error),
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
