"""The kernel, cell by cell, and the executed copy after each."""

# nbclient and nbformat are not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from sgpu_magic.cli.headless import formats
from sgpu_magic.cli.headless.job import Job
from sgpu_magic.cli.headless.outcome import (
    ExecutedCopy,
    ExitCode,
    as_cell,
    code_of,
    prepared,
    text_of,
    title_of,
    traceback_of,
)
from sgpu_magic.options.defaults import VARIABLE, as_variable
from sgpu_magic.views import ansi
from sgpu_magic.views.units import format_seconds

# a cell that runs for hours leaves what it has shown so far
_SAVE_EVERY_S = 20.0
# an interrupted cell is free within 3 s; its run is shown as it ends
_INTERRUPTED_S = 15.0
_SHUTDOWN_S = 20.0
_SHOWN_LINES = 40
_LONGEST_FOLDER = 80


class NotebookRun:
    """One execution of a notebook.

    Args:
        job: What is run.
        copy: Where the executed copy goes; None keeps none.
        out: Takes what cells print, None for nowhere.
        err: Takes a line per cell, and what a script writes to its standard error.
        told: Called with how many cells are done and how many there are.
    """

    def __init__(
        self, job: Job, copy: Path | None, out: TextIO | None, err: TextIO, told: Callable[[int, int], None]
    ) -> None:
        self._job = job
        self._err = err
        self._out = out
        self._told = told
        self._notebook = _read(job)
        self._copy = ExecutedCopy(self._notebook, copy, self._say)
        self._stopped: asyncio.Future[ExitCode]

    def run(self) -> ExitCode:
        """Execute it. SIGINT and SIGTERM end the notebook's runs first. The copy is there whatever happens."""
        return asyncio.run(self._run())

    # ------------------------------------------------------------ the way through

    async def _run(self) -> ExitCode:
        notebook = self._notebook
        for note in prepared(notebook, self._job):
            self._say(f"note: {note}\n")
        self._copy.begin(self._job)
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        client = _Client(
            notebook,
            self._out,
            self._err if self._job.is_script else None,
            kept=self._copy.path is not None,
            kernel_name=self._job.kernel or notebook.metadata.get("kernelspec", {}).get("name", "python3"),
            timeout=None,
            coalesce_streams=True,
            resources={"metadata": {"path": str(self._job.source.parent)}},
        )
        began = time.monotonic()
        timer = None
        if self._job.timeout_s is not None:
            timer = loop.call_later(self._job.timeout_s, self._stop, ExitCode.TIMED_OUT)
        code = ExitCode.FAILED
        try:
            code = await self._with_kernel(client)
        finally:
            if timer is not None:
                timer.cancel()
            self._copy.end(time.monotonic() - began, failed=code is not ExitCode.OK)
        return code

    async def _with_kernel(self, client: _Client) -> ExitCode:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop, ExitCode.INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._stop, ExitCode.TERMINATED)
        saving = loop.create_task(self._save_now_and_then())
        # no `async_setup_kernel`: it takes the signals for itself and ends the kernel without its runs
        client.km = km = client.create_kernel_manager()
        # sockets in a private directory: no port that another user could try
        sockets = _short_folder()
        km.transport = "ipc"
        km.ip = os.path.join(sockets, "k")
        try:
            started = await self._started(client)
            return await self._cells(client) if started is None else started
        finally:
            saving.cancel()
            # of a kernel that did not answer the client keeps nothing
            await self._shut_down(client, km)
            shutil.rmtree(sockets, ignore_errors=True)

    async def _started(self, client: _Client) -> ExitCode | None:
        """Start the kernel; None when it answers."""
        stopped = self._stopped

        async def start() -> None:
            await client.async_start_new_kernel(env=self._environ(), cwd=str(self._job.source.parent))
            await client.async_start_new_kernel_client()

        starting = asyncio.ensure_future(start())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            return stopped.result()
        try:
            await starting
        except (RuntimeError, OSError) as error:
            # nbclient raises a RuntimeError of a kernel that does not answer
            self._say(f"the kernel {client.kernel_name} does not start: {str(error).rstrip('.')}.\n")
            return ExitCode.POOL
        return None

    async def _cells(self, client: _Client) -> ExitCode:
        client.reset_execution_trackers()
        code_cells = [at for at, cell in enumerate(self._notebook.cells) if cell.cell_type == "code"]
        self._told(0, len(code_cells))
        for number, at in enumerate(code_cells, 1):
            cell = self._notebook.cells[at]
            self._say_of_cell(f"[{number}/{len(code_cells)}] {title_of(cell.source)} ... ")
            began = time.monotonic()
            code = await self._cell(client, cell, at)
            took = format_seconds(time.monotonic() - began)
            self._say_of_cell(f"{'' if code is ExitCode.OK else 'failed after '}{took}\n")
            client.print_displays(cell, values=not self._job.is_script)
            self._copy.save()
            if code is not ExitCode.OK:
                self._tell_failure(cell, number, code)
                return code
            self._told(number, len(code_cells))
        client.set_widgets_metadata()
        return ExitCode.OK

    async def _cell(self, client: _Client, cell: Any, at: int) -> ExitCode:
        """Run one cell; a stop interrupts it, and what it shows of that is kept."""
        stopped = self._stopped
        if stopped.done():
            return stopped.result()
        running = asyncio.ensure_future(client.async_execute_cell(cell, at, execution_count=None))
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            # a kernel interrupts by SIGINT, which ends the cell's run by its one stop path
            await client.manager.interrupt_kernel()
            await asyncio.wait((running,), timeout=_INTERRUPTED_S)
            if not running.done():
                running.cancel()
        try:
            await running
        except CellExecutionError as error:
            return stopped.result() if stopped.done() else code_of(error.ename, traceback_of(cell))
        except (DeadKernelError, CellTimeoutError, asyncio.CancelledError):
            if stopped.done():
                return stopped.result()
            self._say("(the kernel died) ")
            return ExitCode.FAILED
        return stopped.result() if stopped.done() else ExitCode.OK

    async def _shut_down(self, client: _Client, km: Any) -> None:
        """The kernel closes its link to the pool when it ends, which ends its runs; KILL after a while."""
        try:
            if km.has_kernel and await km.is_alive():
                try:
                    await asyncio.wait_for(km.shutdown_kernel(now=False), _SHUTDOWN_S)
                except TimeoutError:
                    await km.shutdown_kernel(now=True)
        finally:
            await km.cleanup_resources()
            if client.kc is not None:
                client.kc.stop_channels()

    def _stop(self, code: ExitCode) -> None:
        if not self._stopped.done():
            self._stopped.set_result(code)

    # ------------------------------------------------------------ what is given and kept

    def _environ(self) -> dict[str, str]:
        environ = {**os.environ, **self._job.variables}
        given = self._job.defaults
        environ[VARIABLE] = as_variable(msgspec.structs.replace(given, ui="streams") if self._job.is_script else given)
        # who the runs belong to, as Jupyter tells a kernel
        environ["JPY_SESSION_NAME"] = str(self._job.source)
        if self._job.pool:
            environ["SGPU_POOL"] = self._job.pool
        if self._job.variables:
            # they were given on purpose, so they travel to other machines too
            listed = [environ.get("SGPU_VARIABLES", ""), *self._job.variables]
            environ["SGPU_VARIABLES"] = ",".join(name for name in listed if name)
        return environ

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            self._copy.save()

    # ------------------------------------------------------------ what is said

    def _say(self, text: str) -> None:
        self._err.write(text)
        self._err.flush()

    def _say_of_cell(self, text: str) -> None:
        """Say how far a notebook is; a script is one cell, whose lines are shown as they come."""
        if not self._job.is_script:
            self._say(text)

    def _tell_failure(self, cell: Any, number: int, code: ExitCode) -> None:
        if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            stopped = "stopped; its runs" if self._job.is_script else f"stopped in cell {number}; the notebook's runs"
            self._say(f"{stopped} were ended.\n")
            return
        if self._job.timeout_s is not None and self._stopped.done():
            where = "" if self._job.is_script else f" in cell {number}"
            self._say(f"the time of {format_seconds(self._job.timeout_s)} was over{where}.\n")
        # what a script has printed is there already
        text = "\n".join(traceback_of(cell)) if self._job.is_script else text_of(cell)
        # the notebook's page of help, as the shell has it
        lines = text.replace("`%sgpu_help ", "`sgpu help ").splitlines()
        if len(lines) > _SHOWN_LINES:
            where = f" are in {self._copy.path}" if self._copy.path is not None else ""
            self._say(f"... {len(lines) - _SHOWN_LINES} lines more{where}\n")
        self._say("".join(f"{line}\n" for line in lines[-_SHOWN_LINES:]))


class _Client(NotebookClient):
    """nbclient's, which also passes on what cells print.

    Args:
        notebook: The notebook.
        out: Takes it; None for nowhere.
        err: Takes what goes to standard error; None where both go to one place.
        kept: Somebody reads the outputs afterwards.
        options: nbclient's.
    """

    def __init__(self, notebook: Any, out: TextIO | None, err: TextIO | None, *, kept: bool, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._printed = out
        self._errors = err or out
        self._kept = kept

    @property
    def manager(self) -> Any:
        """The kernel's, whose methods are coroutines."""
        return self.km

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream":
            to = self._errors if msg["content"]["name"] == "stderr" else self._printed
            if to is not None:
                to.write(ansi.plain(msg["content"]["text"]))
                to.flush()
            if not self._kept:
                return None
        return super().process_message(msg, cell, cell_index)

    def print_displays(self, cell: Any, *, values: bool) -> None:
        """Print what the cell shows besides, in its last form: a run's view among it; a program has no value."""
        for output in cell.outputs:
            if output.output_type == "execute_result" and not values:
                continue
            text = str(output.get("data", {}).get("text/plain", ""))
            if self._printed is not None and text:
                self._printed.write(f"{ansi.plain(text)}\n")
                self._printed.flush()


def _read(job: Job) -> Any:
    if not job.is_script:
        return formats.read_notebook(job.source, job.form)
    cell = as_cell(job.source.read_text(encoding="utf-8"), job)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])


def _short_folder() -> str:
    """A private folder whose sockets have names that are short enough: 108 bytes is the most."""
    folder = tempfile.mkdtemp(prefix="sgpu-")
    if len(folder) <= _LONGEST_FOLDER:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="sgpu-", dir="/tmp")
