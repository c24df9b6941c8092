"""A real kernel in its own process, driven over the Jupyter protocol as a front end does."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from tests.benchmarks.measure import MeasurementFailed

_OPEN_PROBE = """
def bench_answer(comm, opened):
    if hasattr(comm, "_reply_subshell_for"):  # ipykernel 7.4 sends later messages elsewhere than they ask for
        comm._reply_subshell_for = lambda data, default: default
    comm.on_msg(lambda message: comm.send({"answer": message["content"]["data"]["ask"]}))
get_ipython().kernel.comm_manager.register_target("bench", bench_answer)
"""


@dataclass
class Reply:
    """What a cell's execution sent back, as the client saw it; all times in seconds from sending the request.

    Args:
        status: "ok", "error", "aborted" or "timeout".
        round_trip_s: When the execute reply came.
        error_s: When the first error message came, None without one.
        error: Exception's name and message, "" without one.
        value: The expression's value, if one was asked for.
        watched_s: When the text that was watched for first came, in whatever kind of message; None if never.
        texts: What was printed, as it came, and the last plain text of each display.
    """

    status: str = "timeout"
    round_trip_s: float = 0.0
    error_s: float | None = None
    error: str = ""
    value: Any = None
    watched_s: float | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(part for parts in self.texts.values() for part in parts)


class CommProbe:
    """Asks a comm over a subshell again and again, and keeps how long each answer took.

    Args:
        client: The kernel's client.
        subshell_id: Subshell that is to handle the questions while the main one is busy.
        pause_s: Seconds between an answer and the next question.
    """

    def __init__(self, client: BlockingKernelClient, subshell_id: str, pause_s: float = 0.02) -> None:
        self.answers_s: list[float] = []
        self._client, self._subshell_id, self._pause_s = client, subshell_id, pause_s
        self._asked_at: float | None = None
        self._next_at = 0.0
        self._count = 0

    def step(self, now: float) -> None:
        """Ask, if no question is open and the pause is over. `now` in seconds of `time.perf_counter`."""
        if self._asked_at is not None or now < self._next_at:
            return
        self._count += 1
        message = self._client.session.msg("comm_msg", {"comm_id": "bench", "data": {"ask": self._count}})
        message["header"]["subshell_id"] = self._subshell_id
        self._client.shell_channel.send(message)
        self._asked_at = time.perf_counter()

    def take(self, content: Mapping[str, Any], now: float) -> None:
        if content.get("comm_id") == "bench" and content["data"].get("answer") == self._count and self._asked_at:
            self.answers_s.append(now - self._asked_at)
            self._asked_at, self._next_at = None, now + self._pause_s

    def finish(self, now: float) -> None:
        """Count a question that is still open as an answer that came now: it took at least so long."""
        if self._asked_at is not None:
            self.answers_s.append(now - self._asked_at)
            self._asked_at = None


class BenchKernel:
    """A fresh ipykernel; a context manager that ends it.

    Args:
        python: Interpreter of the environment that the kernel runs in.
        folder: Empty directory: the kernel's working directory, its connection file and its log.
        environment: All its environment variables.
    """

    def __init__(self, python: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        connection_file, _ = write_connection_file(str(folder / "kernel.json"), ip="127.0.0.1")
        self._log = (folder / "kernel.log").open("w")
        self.process = subprocess.Popen(
            [str(python), "-m", "ipykernel_launcher", "-f", connection_file],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._client = BlockingKernelClient(connection_file=connection_file)
        self._client.load_connection_file()
        # as in JupyterLab; a console sends no cell id
        self._client.session.metadata = {"cellId": "a-cell"}
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=60)
        except RuntimeError as error:
            self.close()
            raise MeasurementFailed(f"the kernel did not start: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ask the kernel to end; kill it after 5 s."""
        with contextlib.suppress(zmq.ZMQError):
            self._client.shutdown()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._client.stop_channels()
        self._log.close()

    def execute(
        self,
        code: str,
        *,
        timeout_s: float = 60.0,
        expression: str | None = None,
        probe: CommProbe | None = None,
        watch_for: str | None = None,
    ) -> Reply:
        """Run a cell and wait until the kernel is idle again.

        Args:
            code: The cell.
            timeout_s: Seconds to wait; after that the status is "timeout" and the kernel of no more use.
            expression: Python expression that the kernel evaluates after the cell; its value must fit JSON.
            probe: Asked all the while.
            watch_for: Text whose first coming is to be timed.
        """
        client, reply = self._client, Reply()
        shell, iopub = client.shell_channel.socket, client.iopub_channel.socket
        poller = zmq.Poller()
        poller.register(shell, zmq.POLLIN)
        poller.register(iopub, zmq.POLLIN)
        wanted = {"value": f"__import__('json').dumps({expression})"} if expression else {}
        started = time.perf_counter()
        request = client.execute(code, user_expressions=wanted)
        replied = idle = False
        while not (replied and idle) and time.perf_counter() - started < timeout_s:
            if probe and not replied:
                probe.step(time.perf_counter())
            ready = dict(poller.poll(10))
            now = time.perf_counter()
            if shell in ready:
                message = client.shell_channel.get_msg(timeout=1)
                if message["parent_header"].get("msg_id") == request and message["msg_type"] == "execute_reply":
                    replied, reply.round_trip_s = True, now - started
                    _read_reply(reply, message["content"])
            if iopub in ready:
                message = client.iopub_channel.get_msg(timeout=1)
                if message["msg_type"] == "comm_msg" and probe:
                    probe.take(message["content"], now)
                elif message["parent_header"].get("msg_id") == request:
                    idle |= _read_output(reply, message, now - started)
                    if watch_for and reply.watched_s is None and watch_for in str(message["content"]):
                        reply.watched_s = now - started
        if probe:
            probe.finish(time.perf_counter())
        return reply

    def check(self, code: str, *, timeout_s: float = 60.0, expression: str | None = None) -> Reply:
        """Run a cell that has to succeed.

        Raises:
            MeasurementFailed: It failed, or was not over within `timeout_s` seconds.
        """
        reply = self.execute(code, timeout_s=timeout_s, expression=expression)
        if reply.status != "ok":
            raise MeasurementFailed(reply.error or f"the cell's status is {reply.status!r} after {timeout_s:g} s")
        return reply

    def open_probe(self) -> CommProbe:
        """Open a comm whose questions a subshell of the kernel answers while cells run.

        Raises:
            MeasurementFailed: The kernel has no subshells (ipykernel before 7).
        """
        self.check(_OPEN_PROBE)
        client = self._client
        request = client.session.msg("create_subshell_request")
        client.control_channel.send(request)
        deadline = time.monotonic() + 10
        subshell_id = None
        while subshell_id is None and time.monotonic() < deadline:
            answer = client.control_channel.get_msg(timeout=10)
            if answer["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                subshell_id = answer["content"].get("subshell_id")
                break
        if subshell_id is None:
            raise MeasurementFailed("the kernel has no subshells")
        client.shell_channel.send(
            client.session.msg("comm_open", {"comm_id": "bench", "target_name": "bench", "data": {}})
        )
        self.check("None")  # the comm is open once the main shell has executed a later cell
        return CommProbe(client, subshell_id)


def _read_reply(reply: Reply, content: Mapping[str, Any]) -> None:
    reply.status = content["status"]
    if reply.status == "error":
        reply.error = reply.error or f"{content['ename']}: {content['evalue']}"
    found = content.get("user_expressions", {}).get("value")
    if found and found["status"] == "ok":
        reply.value = json.loads(ast.literal_eval(found["data"]["text/plain"]))
    elif found and reply.status == "ok":
        reply.status, reply.error = "error", f"{found['ename']}: {found['evalue']}"


def _read_output(reply: Reply, message: Mapping[str, Any], at_s: float) -> bool:
    """Take one message of the cell's output; True when it says that the kernel is idle."""
    content = message["content"]
    match message["msg_type"]:
        case "status":
            return content["execution_state"] == "idle"
        case "stream":
            reply.texts.setdefault("printed", []).append(content["text"])
        case "display_data" | "update_display_data":
            key = content.get("transient", {}).get("display_id") or f"display {len(reply.texts)}"
            reply.texts[key] = [content["data"].get("text/plain", "")]
        case "error" if reply.error_s is None:
            reply.error_s, reply.error = at_s, f"{content['ename']}: {content['evalue']}"
    return False
