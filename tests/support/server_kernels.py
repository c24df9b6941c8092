"""Kernels of a Jupyter server driven as by a notebook's page, and cells that run in them meanwhile."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import websocket
from homes import Home
from jupyter_servers import JupyterServer
from waiting import eventually

from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

_UNTIL_TOLD = """\
import os, time
print('begun on', rank, flush=True)
step = 0
while not os.path.exists({name!r}):
    step += 1
    print('step', step, flush=True)
    time.sleep(0.05)
print('last words of', rank)
"""

RICH = """
from IPython.display import HTML, display
print('before', rank)
if rank == 0:
    display(HTML('<b>rich</b>'))
print('after', rank)
rank * 10
"""


class ServerKernel:
    """A kernel of a Jupyter server, driven over its websocket as by a notebook's page."""

    def __init__(self, server: JupyterServer) -> None:
        self._server = server
        answer = server.post("api/kernels", {"name": "python3"})
        assert answer.status == 201, answer
        self.id: str = answer.body["id"]
        address = (
            f"ws{server.url.removeprefix('http')}/api/kernels/{self.id}/channels?session_id=page&token={server.token}"
        )
        self._socket = websocket.create_connection(address, timeout=60)
        self._count = 0

    def start(self, code: str, cell: str = "", prompts: bool = False) -> str:
        """Send a cell and return the message's id.

        Args:
            code: The cell's code.
            cell: The id that the page gives the cell, "" for none.
            prompts: The page can prompt a person, as those of notebooks can.
        """
        self._count += 1
        message = {
            "header": {
                "msg_id": f"m{self._count}",
                "msg_type": "execute_request",
                "session": "page",
                "username": "",
                "version": "5.3",
                "date": "",
            },
            "parent_header": {},
            "metadata": {"cellId": cell} if cell else {},
            "content": {
                "code": code,
                "silent": False,
                "store_history": True,
                "allow_stdin": prompts,
                "user_expressions": {},
                "stop_on_error": False,
            },
            "channel": "shell",
            "buffers": [],
        }
        self._socket.send(json.dumps(message))
        return message["header"]["msg_id"]

    def finish(self, message_id: str) -> list[dict[str, Any]]:
        """Return a cell's final outputs, as a notebook saves them."""
        outputs: list[dict[str, Any]] = []
        shown: dict[str, dict[str, Any]] = {}
        missing = {"idle", "reply"}
        while missing:
            message = json.loads(_text(self._socket.recv()))
            content, kind = message["content"], message["header"]["msg_type"]
            display = content.get("transient", {}).get("display_id", "")
            if kind == "update_display_data" and display in shown:
                shown[display] |= {"data": content["data"], "metadata": content["metadata"]}
            if message["parent_header"].get("msg_id") != message_id:
                continue
            if kind in ("display_data", "execute_result", "error"):
                output = {key: value for key, value in content.items() if key != "transient"}
                outputs.append({"output_type": kind, **output})
                shown[display] = outputs[-1]
            elif kind == "execute_reply":
                missing.discard("reply")
            elif kind == "status" and content["execution_state"] == "idle":
                missing.discard("idle")
        # without the placeholders that the kernel has left empty
        return [output for output in outputs if output.get("data") != {"text/plain": ""}]

    def run(self, code: str, cell: str = "", prompts: bool = False) -> list[dict[str, Any]]:
        return self.finish(self.start(code, cell, prompts))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def loaded_kernel(server: JupyterServer, options: str = "") -> Generator[ServerKernel]:
    """Yield a kernel with the magics loaded, whose pool has run a cell with these options, and close it at the end."""
    made = ServerKernel(server)
    made.run("%load_ext sgpu_magic")
    made.run(f"%%distributed -n 2 {options} --ui none\npass")
    yield made
    made.close()


class RunningCell:
    """A cell that runs until the test ends it; its kernel is busy meanwhile.

    Args:
        context: The home of its server.
        kernel: The kernel that runs it.
        name: The run's name.
        options: Further options of its magic.
        runs_in: The home whose pool has the run; the server's if left out.
    """

    def __init__(
        self, context: Home, kernel: ServerKernel, name: str, options: str = "", runs_in: Home | None = None
    ) -> None:
        home = context if runs_in is None else runs_in
        self._word = context.work / name
        self._kernel = kernel
        code = _UNTIL_TOLD.format(name=str(self._word))
        self._message = kernel.start(f"%%distributed -n 2 --name {name} {options}\n{code}", cell=f"cell-{name}")
        self.run_id = eventually(lambda: home.run_named(name), 30, "the run does not start")
        eventually(lambda: "step 3" in home.log(self.run_id, 1), 30, "the run prints nothing")
        self.path = f"sgpu/runs/{self.run_id}"

    def end(self) -> list[dict[str, Any]]:
        """Let the cell end, and return its outputs from the kernel."""
        self._word.touch()
        return self.wait()

    def wait(self) -> list[dict[str, Any]]:
        """Wait until the cell ends by itself."""
        return self._kernel.finish(self._message)


def same(of_server: list[dict[str, Any]], of_kernel: list[dict[str, Any]]) -> None:
    """Compare the outputs of a cell part by part: a difference of two whole HTML pages would be unreadable."""
    assert [output["output_type"] for output in of_server] == [output["output_type"] for output in of_kernel]
    for ours, theirs in zip(of_server, of_kernel, strict=True):
        for key in {**ours, **theirs}:
            if key == "data":
                assert list(ours["data"]) == list(theirs["data"])
                for kind, content in theirs["data"].items():
                    assert ours["data"][kind] == content, kind
            else:
                assert ours.get(key) == theirs.get(key), key


def ask(server: JupyterServer, path: str, **question: object) -> dict[str, Any]:
    answer = server.post(f"{path}/ask", {"n": 7, **question})
    assert answer.status == 200, answer
    assert answer.body["n"] == 7
    return answer.body


def spec_of(run_id: str) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        name="t",
        cell=CellSource(body="pass"),
        placement=Placement(ranks=1, device_type="cpu"),
        outputs=(),
        owner=Owner(pid=1, host="h", user="u"),
        timeout_s=1.0,
    )


def _text(frame: str | bytes) -> str:
    return frame if isinstance(frame, str) else frame.decode()
