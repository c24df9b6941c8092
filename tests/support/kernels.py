"""Real kernels in their own home, for the end-to-end tests.

Home      a pool's directories in a temporary folder with a short path, and every process that belongs to it
Kernel    one ipykernel in a home, driven as by a front end
Cell      a cell that was sent
Reply     what a cell's execution sent back
eventually   wait for a condition with a deadline
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import unescape
from queue import Empty
from typing import Any

from free_ports import free_ports
from front_end import WIDGET_MIME, FrontEnd, LiveView
from homes import Home
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from process_table import (
    Process,
    descriptors,
    is_alive,
    level,
    listening,
    process_table,
    stop_process,
    thread_count,
    wait_gone,
)
from waiting import eventually

__all__ = [
    "Cell",
    "Home",
    "Kernel",
    "Output",
    "Process",
    "Reply",
    "descriptors",
    "eventually",
    "is_alive",
    "level",
    "listening",
    "plain",
    "process_table",
    "stop_process",
    "thread_count",
    "wait_gone",
]

_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TAG = re.compile(r"<[^>]*>")


def plain(text: str) -> str:
    """Return the text without colours."""
    return _ANSI.sub("", text)


@dataclass
class Output:
    """One output of a cell, in its final form: `stream`, `display` or `result`; `view` is the widget in it."""

    kind: str
    data: dict[str, Any]
    display_id: str = ""
    stream: str = ""
    view: LiveView | None = None

    @property
    def text(self) -> str:
        return plain(self.view.text if self.view is not None else str(self.data.get("text/plain", "")))

    @property
    def html(self) -> str:
        return str(self.data.get("text/html", "")) if self.view is None else ""

    @property
    def log(self) -> str:
        """Return its lines: those of the HTML form if there is one, since text has only the first and last of many."""
        return unescape(_TAG.sub("", re.sub("</?pre", r"\n\g<0>", self.html))) if self.html else self.text


@dataclass
class Reply:
    """What a cell's execution sent back.

    Args:
        status: `ok`, `error` or `aborted`; "" while it runs.
        ename, evalue, traceback: The error; the traceback is one text without colours.
        outputs: The outputs in their order below the cell, each in its final form.
        seconds: The time from the request to the end.
    """

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    outputs: list[Output] = field(default_factory=list)
    seconds: float = 0.0
    execution_count: int = 0
    messages: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return all text that a reader sees below the cell, except the error."""
        return "\n".join(output.text.rstrip("\n") for output in self.outputs if output.text)

    @property
    def shown(self) -> str:
        """Return all text that a reader sees below the cell, the error last."""
        return f"{self.text}\n{self.traceback}"

    @property
    def streams(self) -> str:
        """Return what the kernel itself has printed."""
        return "".join(output.text for output in self.outputs if output.kind == "stream")

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Return the data of every display, in order."""
        return [output.data for output in self.outputs if output.kind == "display"]

    @property
    def html(self) -> str:
        return "\n".join(output.html for output in self.outputs if output.html)

    @property
    def result(self) -> str:
        """Return the `Out[]` text, "" if there is none."""
        return next((output.text for output in self.outputs if output.kind == "result"), "")

    def lines(self, rank: int) -> list[str]:
        """Return the lines that are shown with this rank's prefix."""
        mark = f"[{rank}] "
        # the labels of several ranks are aligned
        lines = [line.lstrip(" ") for output in self.outputs for line in output.log.splitlines()]
        return [line[len(mark) :] for line in lines if line.startswith(mark)]

    @property
    def story(self) -> str:
        """Return everything that helps to understand a failed check."""
        return f"{self.status} after {self.seconds:.2f} s\n{self.text}\n{self.traceback or self.evalue}"


class Kernel:
    """An ipykernel in a home.

    Args:
        home: Its home.
        load: Run `%load_ext sgpu_magic` first.
        variables: Further environment variables.
        wait: Wait until it is ready; else call `ready` before running anything.
        python: The Python that runs the kernel.
        server_id: Its id in a Jupyter server; "" for a kernel that no server has started.
        greets: Its front end greets live views, as one that can draw them does.
    """

    def __init__(
        self,
        home: Home,
        *,
        load: bool = True,
        variables: Mapping[str, str] | None = None,
        wait: bool = True,
        greets: bool = True,
        python: str = sys.executable,
        server_id: str = "",
    ) -> None:
        self.home = home
        self._greets = greets
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._manager = KernelManager(cache_ports=False, **ports)
        self._manager._kernel_spec = KernelSpec(
            argv=[python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            language="python",
            display_name="test",
        )
        self._manager.connection_file = str(home.path / f"kernel-{server_id or os.urandom(4).hex()}.json")
        self._log = open(home.path / "kernel.log", "ab")  # noqa: SIM115  closed with the kernel
        self._manager.start_kernel(
            env=home.environ | dict(variables or {}), cwd=str(home.work), stdout=self._log, stderr=self._log
        )
        self._replies: dict[str, Reply] = {}
        self.client: Any = None
        self.front_end: FrontEnd
        home.kernel_pids.add(self.pid)
        self._load = load
        if wait:
            self.ready()

    def ready(self) -> None:
        """Connect to the started process and wait until it is ready."""
        self._connect()
        # ipykernel closes the pipes of ended threads every 10 s, which is as long as a leak check waits
        self.value("setattr(get_ipython().kernel.iopub_thread, '_event_pipe_gc_seconds', 0.3)")
        if self._load:
            self.check("%load_ext sgpu_magic")
            # most of the extension is loaded after the cell, and at the latest with the next one
            self.start("pass", silent=True).wait()

    def _connect(self) -> None:
        self.client = self._manager.client()
        # as in JupyterLab; a console sends no cell id
        self.client.session.metadata = {"cellId": "a-cell"}
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError as error:
            raise AssertionError(f"{error}. It says: {self._log_tail()}") from error
        self.front_end = FrontEnd(self.client, greets=self._greets)
        self.home.kernel_pids.add(self.pid)

    def _log_tail(self) -> str:
        return (self.home.path / "kernel.log").read_text(errors="replace")[-2000:]

    @property
    def pid(self) -> int:
        return self._manager.provisioner.pid

    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.pid is not None and self._manager.is_alive()

    # ------------------------------------------------------------ cells

    def start(self, code: str, *, stop_on_error: bool = True, silent: bool = False) -> Cell:
        """Send a cell without waiting for it."""
        began = time.monotonic()  # before the kernel can receive it
        msg_id = self.client.execute(code, stop_on_error=stop_on_error, silent=silent)
        reply = self._replies[msg_id] = Reply()
        return Cell(self, msg_id, reply, began)

    def run(self, code: str, timeout_s: float = 60.0, *, stop_on_error: bool = False) -> Reply:
        """Run a cell and return all that it sent back."""
        return self.start(code, stop_on_error=stop_on_error).wait(timeout_s)

    def check(self, code: str, timeout_s: float = 60.0) -> Reply:
        """Run a cell that must succeed."""
        reply = self.run(code, timeout_s)
        assert reply.status == "ok", reply.story
        return reply

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the notebook, which must be representable in JSON."""
        wrapped = f"__import__('json').dumps({expression})"
        msg_id = self.client.execute("", silent=True, user_expressions={"value": wrapped})
        while True:
            message = self.client.get_shell_msg(timeout=30)
            if message["parent_header"].get("msg_id") == msg_id:
                found = message["content"]["user_expressions"]["value"]
                assert found["status"] == "ok", f"{expression}: {found['ename']}: {found['evalue']}"
                return json.loads(ast.literal_eval(found["data"]["text/plain"]))

    def complete(self, code: str) -> list[str]:
        """Return the completer's matches at the end of `code`."""
        return self.client.complete(code, len(code), reply=True, timeout=30)["content"]["matches"]

    # ------------------------------------------------------------ life

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """Restart the kernel, as the restart button does, without loading the extension."""
        self.client.stop_channels()
        self.home.kernel_pids.discard(self.pid)
        self._manager.restart_kernel(now=False)
        self._connect()

    def kill(self) -> None:
        """Send SIGKILL, as the system does when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        self._manager.provisioner.process.wait(10)

    def close(self) -> None:
        """Shut the kernel down as a server does."""
        pid = self.pid
        try:
            if self.client is not None:
                self.client.stop_channels()
            if pid is not None:
                self._manager.shutdown_kernel(now=not self._manager.is_alive())
        finally:
            self._manager.cleanup_resources()
            self._log.close()
            self.home.kernel_pids.discard(pid)

    # ------------------------------------------------------------ messages

    def _pump(self, timeout_s: float) -> str:
        """Add one iopub message to its reply; return the request's id when the request is complete."""
        try:
            message = self.client.get_iopub_msg(timeout=timeout_s)
        except Empty:
            self.front_end.take_replies()
            return ""
        self.front_end.take(message)
        self.front_end.take_replies()
        msg_id = message["parent_header"].get("msg_id", "")
        reply = self._replies.get(msg_id)
        if reply is None:
            return ""
        kind, content = message["msg_type"], message["content"]
        reply.messages.append(kind)
        if kind == "status" and content["execution_state"] == "idle":
            return msg_id
        # a display is updated in every reply that shows it
        for each in self._replies.values() if kind == "update_display_data" else (reply,):
            _take(each, kind, content)
        for output in reply.outputs:
            shown = output.data.get(WIDGET_MIME)
            output.view = self.front_end.views.get(shown["model_id"]) if shown else None
        return ""

    def _finish(self, msg_id: str, reply: Reply) -> None:
        while True:
            message = self.client.get_shell_msg(timeout=30)
            if message["parent_header"].get("msg_id") in self._replies:
                other = self._replies[message["parent_header"]["msg_id"]]
                other.status = message["content"]["status"]
                other.execution_count = message["content"].get("execution_count", 0) or 0
            if reply.status:
                return


@dataclass
class Cell:
    """A cell that was sent."""

    kernel: Kernel
    msg_id: str
    reply: Reply
    began: float
    idle: bool = False

    def wait(self, timeout_s: float = 60.0) -> Reply:
        """Wait for the end of the cell and return its reply."""
        self._pump_until(lambda: self.idle, timeout_s, "the cell's end")
        if not self.reply.status:
            self.kernel._finish(self.msg_id, self.reply)
        self.reply.seconds = time.monotonic() - self.began
        return self.reply

    def until_shown(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until `text` is shown below the cell."""
        self._pump_until(lambda: text in self.reply.text, timeout_s, f"{text!r} below the cell")

    def until(self, condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> None:
        """Wait for a condition while handling the cell's messages."""
        self._pump_until(condition, timeout_s, what or "the condition")

    def _pump_until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.reply.story}")
            self.idle |= self.kernel._pump(0.05) == self.msg_id


def _take(reply: Reply, kind: str, content: Mapping[str, Any]) -> None:
    match kind:
        case "stream":
            last = reply.outputs[-1] if reply.outputs else None
            if last is not None and last.kind == "stream" and last.stream == content["name"]:
                last.data["text/plain"] += content["text"]
            else:
                reply.outputs.append(Output("stream", {"text/plain": content["text"]}, stream=content["name"]))
        case "display_data":
            display_id = content.get("transient", {}).get("display_id", "")
            reply.outputs.append(Output("display", content["data"], display_id))
        case "update_display_data":
            display_id = content.get("transient", {}).get("display_id", "")
            for output in reply.outputs:
                if output.display_id == display_id:
                    output.data = content["data"]
        case "execute_result":
            reply.outputs.append(Output("result", content["data"]))
        case "clear_output":
            reply.outputs.clear()
        case "error":
            reply.ename, reply.evalue = content["ename"], content["evalue"]
            reply.traceback = plain("\n".join(content["traceback"]))
        case _:
            pass
