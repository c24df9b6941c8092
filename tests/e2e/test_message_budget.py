"""However much ranks print: at most 10 messages a second to the live view, none above 64 kB, and nothing is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_end import WIDGET_MIME, FrontEnd, LiveView
from kernels import Home, Kernel
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect
from waiting import eventually

pytestmark = pytest.mark.slow

RANKS, LINES = 4, 100_000
# as fast as possible, then slowly, so that the end is shown live as well
FLOOD = (
    f"%%distributed -n {RANKS}\n"
    "import time\n"
    f"for i in range({LINES}): print('step', i, 'loss', 0.5)\n"
    "print('flooded', flush=True); time.sleep(1.5)"
)
PER_SECOND, MOST_BYTES = 10, 64_000


def assert_within_budget(view: LiveView) -> None:
    times = [sent.at for sent in view.sent]
    for at, began in enumerate(times):
        # a message is created a moment before it is sent; the delay varies on a busy machine
        within = sum(1 for other in times[at:] if other - began < 0.9)
        assert within <= PER_SECOND, [round(other - times[0], 3) for other in times]
    assert len(times) <= PER_SECOND * (times[-1] - times[0]) + PER_SECOND
    assert max(sent.size for sent in view.sent) <= MOST_BYTES


def assert_gapless(view: LiveView) -> None:
    """Every line was told or counted as skipped."""
    assert view.seqs == list(range(1, len(view.seqs) + 1))
    at = view.reported[0][0]
    for first, count in view.reported:
        assert first == at, f"told from {first}, expected {at}"
        at = first + count
    assert at == RANKS * (LINES + 1)


def test_a_flood_of_lines_keeps_to_the_budget(kernel: Kernel):
    cell = kernel.start(FLOOD)
    cell.until(lambda: cell.reply.outputs and WIDGET_MIME in cell.reply.outputs[0].data, what="the view")
    view = kernel.front_end.view
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    assert_within_budget(view)
    assert_gapless(view)
    assert view.skipped > RANKS * LINES / 2
    assert reply.displays[0]["application/vnd.sgpu.run.v1+json"]["lines"] == RANKS * (LINES + 1)


# ---------------------------------------------------------------- through a Jupyter server


class Server:
    """A Jupyter server in a home, with its default limits.

    Args:
        home: Where it runs.
    """

    def __init__(self, home: Home) -> None:
        self._log = open(home.path / "server.log", "wb")  # noqa: SIM115  closed with the server
        command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--port=0"]
        command += ["--IdentityProvider.token=budget", f"--ServerApp.root_dir={home.work}"]
        self.process = subprocess.Popen(
            command, env=home.environ, cwd=home.work, stdout=self._log, stderr=self._log, start_new_session=True
        )
        home.kernel_pids.add(self.process.pid)
        self._home = home
        folder = Path(home.environ["JUPYTER_RUNTIME_DIR"])
        info = eventually(lambda: next(iter(folder.glob("jpserver-*.json")), None), 30, "the server")
        self.url = eventually(lambda: info.read_text() and json.loads(info.read_text())["url"], 10, "its address")
        eventually(self._answers, 30, "the server's answer")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            self.request("GET", "api/status")
            return True
        return False

    @property
    def log(self) -> str:
        return (self._home.path / "server.log").read_text()

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        asked = urllib.request.Request(self.url + path, data, {"Authorization": "token budget"}, method=method)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return json.loads(answer.read() or b"{}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        self.process.wait(20)
        self._log.close()
        self._home.kernel_pids.discard(self.process.pid)


@pytest.fixture
def server(new_home: Callable[..., Home]) -> Iterator[Server]:
    made = Server(new_home())
    yield made
    made.close()


class Page:
    """A notebook's page: the kernel's channels over the server's websocket.

    Args:
        socket: The open websocket.
    """

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._sent = 0
        self.streams = ""
        self.outputs: dict[str, dict[str, Any]] = {}
        self.front_end = FrontEnd(None, greets=False)

    async def send(self, channel: str, kind: str, content: dict[str, Any]) -> str:
        self._sent += 1
        msg_id = f"page-{self._sent}"
        header = {"msg_id": msg_id, "msg_type": kind, "username": "", "session": "page", "version": "5.4", "date": ""}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": channel}
        await self._socket.write_message(json.dumps(message | {"buffers": []}))
        return msg_id

    async def run(self, code: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Run a cell and return its reply's content, once it is idle too."""
        asked = {"silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": True}
        msg_id = await self.send("shell", "execute_request", {"code": code, "stop_on_error": True, **asked})
        reply: dict[str, Any] = {}
        idle = False
        end = time.monotonic() + timeout_s
        while not (reply and idle):
            text = await asyncio.wait_for(self._socket.read_message(), max(end - time.monotonic(), 0))
            assert isinstance(text, str), "the server has closed the websocket"
            message = json.loads(text)
            mine = message["parent_header"].get("msg_id") == msg_id
            kind, content = message["header"]["msg_type"], message["content"]
            idle |= mine and kind == "status" and content["execution_state"] == "idle"
            if mine and kind == "execute_reply":
                reply = content
            await self._take(message | {"msg_type": kind}, kind, content)
        return reply

    async def _take(self, message: dict[str, Any], kind: str, content: dict[str, Any]) -> None:
        known = len(self.front_end.views)
        self.front_end.take(message)
        if len(self.front_end.views) > known:
            question = {"kind": "hello", "n": 1, "over": "control"}
            asked = {"model_id": self.front_end.view.model_id, "question": question}
            await self.send("control", "sgpu_request", asked)
        if kind == "sgpu_reply":
            self.front_end.view.take_content(content["answer"])
        if kind == "stream":
            self.streams += content["text"]
        if kind in ("display_data", "update_display_data"):
            self.outputs[content["transient"]["display_id"]] = content["data"]


def test_a_jupyter_server_drops_nothing(server: Server):
    kernel_id = server.request("POST", "api/kernels", {"name": "python3"})["id"]

    async def work() -> Page:
        address = f"{server.url.replace('http', 'ws', 1)}api/kernels/{kernel_id}/channels?session_id=page"
        socket = await websocket_connect(HTTPRequest(address, headers={"Authorization": "token budget"}))
        page = Page(socket)
        assert (await page.run("%load_ext sgpu_magic"))["status"] == "ok"
        assert (await page.run(f"%%distributed -n {RANKS} --ui none\npass"))["status"] == "ok"
        assert (await page.run(FLOOD))["status"] == "ok"
        socket.close()
        return page

    page = asyncio.run(work())
    server.request("DELETE", f"api/kernels/{kernel_id}")
    view = page.front_end.view
    assert view.hello_seq is not None
    assert "rate exceeded" not in page.streams + server.log
    assert_within_budget(view)
    assert_gapless(view)
    assert not any(WIDGET_MIME in data for data in page.outputs.values())
    # the kernel may also show a notice, such as that the pool took long to start
    (final,) = [data for data in page.outputs.values() if "application/vnd.sgpu.run.v1+json" in data]
    assert "succeeded" in final["text/plain"]
