"""Executes a notebook cell by cell in a kernel, and saves the executed copy after each cell."""

# nbclient and nbformat are not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from msgspec.structs import replace
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from sgpu_magic.cli.headless.cell_end import EXPRESSION, CellEnd, ExitCode, read_end
from sgpu_magic.cli.headless.job import HeadlessJob
from sgpu_magic.cli.headless.outcome import (
    ExecutedCopy,
    kernel_lines,
    notebook_of,
    prepared,
    text_of,
    title_of,
    traceback_of,
)
from sgpu_magic.formatting import format_seconds
from sgpu_magic.options import notebook_job
from sgpu_magic.options.notebook_job import VARIABLE, as_variable
from sgpu_magic.views import ansi

# so that the output of a cell that runs for hours is saved too
_SAVE_EVERY_S = 20.0
# an interrupted cell returns within 3 s; the rest is for showing how its run ends
_INTERRUPTED_S = 15.0
_SHUTDOWN_S = 20.0
# a kernel that has just reported an exception is idle
_ANSWER_TIMEOUT_S = 10.0
_SHOWN_LINES = 40
_LONGEST_FOLDER = 80


class NotebookRun:
    """One execution of a notebook.

    Args:
        job: The job.
        copy: Path of the executed copy, None for none.
        out: Stream for the cells' output, None to discard it.
        err: Stream for a line per cell, and for a script's standard error.
        on_progress: Called with the number of cells done and the total.

    Attributes:
        exit_value: The value of `dbutils.notebook.exit`, after which no cell ran; None if the notebook did not call it.
    """

    def __init__(
        self,
        job: HeadlessJob,
        copy: Path | None,
        out: TextIO | None,
        err: TextIO,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._job = job
        self._err = err
        self._out = out
        self._on_progress = on_progress
        self._notebook = notebook_of(job)
        self._copy = ExecutedCopy(self._notebook, copy, self._say)
        self._stopped: asyncio.Future[ExitCode]
        self.exit_value: str | None = None

    def run(self, until: float = math.inf) -> ExitCode:
        """Execute the notebook. SIGINT and SIGTERM end its runs first. The executed copy is written in any case.

        Args:
            until: When the job's time limit is over, by the monotonic clock.
        """
        return asyncio.run(self._run(until))

    # ------------------------------------------------------------ execution

    async def _run(self, until: float) -> ExitCode:
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
            kernel_name=self._job.file.kernel or notebook.metadata.get("kernelspec", {}).get("name", "python3"),
            timeout=None,
            coalesce_streams=True,
            extra_arguments=kernel_lines(self._job) if self._job.is_script else [],
            resources={"metadata": {"path": str(self._job.folder)}},
        )
        began = time.monotonic()
        timer = None if until == math.inf else loop.call_later(until - began, self._stop, ExitCode.TIMED_OUT)
        code = ExitCode.FAILED
        try:
            code = await self._with_kernel(client)
            return code
        finally:
            if timer is not None:
                timer.cancel()
            self._copy.end(time.monotonic() - began, failed=code is not ExitCode.OK)

    async def _with_kernel(self, client: _Client) -> ExitCode:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop, ExitCode.INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._stop, ExitCode.TERMINATED)
        saving = loop.create_task(self._save_now_and_then())
        # not `async_setup_kernel`, which installs its own signal handlers and kills the kernel without ending its runs
        client.km = km = client.create_kernel_manager()
        # sockets in a private directory: no ports that other users could connect to
        sockets = _short_folder()
        km.transport = "ipc"
        km.ip = os.path.join(sockets, "k")
        try:
            started = await self._started(client)
            return await self._cells(client) if started is None else started
        finally:
            saving.cancel()
            # pass the manager: the client drops it if the kernel did not answer
            await self._shut_down(client, km)
            shutil.rmtree(sockets, ignore_errors=True)

    async def _started(self, client: _Client) -> ExitCode | None:
        """Start the kernel. Returns None if it answers, else the exit code."""
        stopped = self._stopped

        async def start() -> None:
            await client.async_start_new_kernel(env=self._environ(), cwd=str(self._job.folder))
            await client.async_start_new_kernel_client()

        starting = asyncio.ensure_future(start())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            stopped_by = self._exceeded() if stopped.result() is ExitCode.TIMED_OUT else "stopped"
            self._say(f"{stopped_by} while the kernel was starting; nothing has run.\n")
            return stopped.result()
        try:
            await starting
        except (RuntimeError, OSError) as error:
            # nbclient raises RuntimeError for a kernel that does not answer
            self._say(f"the kernel {client.kernel_name} does not start: {str(error).rstrip('.')}.\n")
            return ExitCode.POOL
        return None

    async def _cells(self, client: _Client) -> ExitCode:
        client.reset_execution_trackers()
        code_cells = [at for at, cell in enumerate(self._notebook.cells) if cell.cell_type == "code"]
        self._on_progress(0, len(code_cells))
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
                self._print_failure(cell, number, code)
                return code
            self._on_progress(number, len(code_cells))
            if self.exit_value is not None:
                self._say(f"the notebook exited in cell {number} with: {self.exit_value}\n")
                break
        client.set_widgets_metadata()
        return ExitCode.OK

    async def _cell(self, client: _Client, cell: Any, at: int) -> ExitCode:
        """Run one cell. A stop interrupts it; the output of the interrupt is kept."""
        stopped = self._stopped
        if stopped.done():
            return stopped.result()
        running = asyncio.ensure_future(client.async_execute_cell(cell, at, execution_count=None))
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            # the kernel gets SIGINT, which stops the cell's run as in a notebook
            await client.manager.interrupt_kernel()
            await asyncio.wait((running,), timeout=_INTERRUPTED_S)
            if not running.done():
                running.cancel()
        try:
            await running
        except CellExecutionError:
            if stopped.done():
                return stopped.result()
            end = await self._end(client)
            if end.exit_value is not None:
                self.exit_value = end.exit_value
                self._copy.exited(cell, self.exit_value)
            elif self._job.is_script and end.is_clean_exit:
                # a script that launches functions runs in the kernel itself
                cell.outputs = [output for output in cell.outputs if output.output_type != "error"]
                return ExitCode.OK
            return end.code
        except (DeadKernelError, CellTimeoutError, asyncio.CancelledError):
            if stopped.done():
                return stopped.result()
            self._say("(the kernel died) ")
            return ExitCode.FAILED
        return stopped.result() if stopped.done() else ExitCode.OK

    async def _end(self, client: _Client) -> CellEnd:
        """Ask the kernel how the failed cell ended; a plain failure if it does not answer."""
        kernel: Any = client.kc
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                reply = await kernel.execute(
                    "", silent=True, user_expressions={"end": EXPRESSION}, reply=True, timeout=_ANSWER_TIMEOUT_S
                )
            except (TimeoutError, RuntimeError):
                break
            # a kernel aborts requests that reach it while it reports an exception
            if reply["content"]["status"] != "aborted":
                return read_end(reply["content"].get("user_expressions", {}).get("end", {}))
        return CellEnd()

    async def _shut_down(self, client: _Client, km: Any) -> None:
        """Shut down the kernel, which closes its link to the pool and so ends its runs. Kill it after a timeout."""
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

    # ------------------------------------------------------------ environment and copy

    def _environ(self) -> dict[str, str]:
        job = self._job
        environ = {**os.environ, **job.variables}
        given, source = job.defaults, str(job.source)
        if job.is_script:
            on_ranks = self._notebook.cells[-1].source.startswith("%%distributed")
            arguments = (job.as_written, *job.arguments) if on_ranks else ()
            given = replace(given, ui="streams", script=source, arguments=arguments, module=job.module)
        environ[VARIABLE] = as_variable(given)
        # also without parameters: `dbutils.notebook.run` in a notebook must not pass on those of its own job
        environ[notebook_job.PARAMETERS_VARIABLE] = notebook_job.parameters_as_variable(job.file.parameters)
        # the owner of the runs, as Jupyter passes it to a kernel
        environ["JPY_SESSION_NAME"] = source
        if job.file.pool:
            environ["SGPU_POOL"] = job.file.pool
        if job.variables:
            # given explicitly, so they are sent to other machines too
            environ["SGPU_VARIABLES"] = ",".join(filter(None, [environ.get("SGPU_VARIABLES"), *job.variables]))
        return environ

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            self._copy.save()

    # ------------------------------------------------------------ messages

    def _say(self, text: str) -> None:
        self._err.write(text)
        self._err.flush()

    def _say_of_cell(self, text: str) -> None:
        """Report a notebook's progress. Not for a script, which is one cell whose output is streamed."""
        if not self._job.is_script:
            self._say(text)

    def _exceeded(self) -> str:
        return f"the time limit of {format_seconds(self._job.timeout_s or 0)} was exceeded"

    def _print_failure(self, cell: Any, number: int, code: ExitCode) -> None:
        is_script = self._job.is_script
        where = "" if is_script else f" in cell {number}"
        if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            whose = "its" if is_script else "the notebook's"
            self._say(f"stopped{where}; {whose} runs were ended.\n")
            return
        if self._job.timeout_s is not None and self._stopped.done():
            self._say(f"{self._exceeded()}{where}.\n")
        # a script's output is shown already
        text = "\n".join(traceback_of(cell)) if is_script else text_of(cell)
        # name the help page by its shell command
        lines = text.replace("`%sgpu_help ", "`sgpu help ").splitlines()
        if len(lines) > _SHOWN_LINES:
            where = f" are in {self._copy.path}" if self._copy.path is not None else ""
            self._say(f"... {len(lines) - _SHOWN_LINES} more lines{where}\n")
        self._say("".join(f"{line}\n" for line in lines[-_SHOWN_LINES:]))


class _Client(NotebookClient):
    """nbclient's client, which also streams the cells' output.

    Args:
        notebook: The notebook.
        out: Stream for the output; None to discard it.
        err: Stream for standard error; None for the same as `out`.
        kept: Whether the outputs are kept in the notebook.
        options: nbclient's options.
    """

    def __init__(self, notebook: Any, out: TextIO | None, err: TextIO | None, *, kept: bool, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._printed = out
        self._errors = err or out
        self._kept = kept

    @property
    def manager(self) -> Any:
        """The kernel manager, whose methods are coroutines."""
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
        """Print the cell's displays in their final form, such as the view of a run.

        Args:
            cell: The executed cell.
            values: Also print the value of its last expression.
        """
        for output in cell.outputs:
            text = str(output.get("data", {}).get("text/plain", ""))
            if self._printed is not None and text and (values or output.output_type != "execute_result"):
                print(ansi.plain(text), file=self._printed, flush=True)


def _short_folder() -> str:
    """Create a private folder for sockets, whose paths may have 108 bytes at most."""
    folder = tempfile.mkdtemp(prefix="sgpu-")
    if len(folder) <= _LONGEST_FOLDER:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="sgpu-", dir="/tmp")
