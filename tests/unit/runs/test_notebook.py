"""Messages from this process to its notebook between runs: notices, the progress of uploads, and a restart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from waiting import eventually

from sgpu_magic.runs.kernel_restarts import watch_restarts
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.runs.notices import NoticeBoard, SendingBoard


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The messages that the front end receives."""
    publisher = CapturingDisplayPublisher()
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "display_pub", publisher)
    return publisher.outputs


def test_a_notice_is_shown_in_one_place_and_taken_away(shown: list[dict[str, Any]]):
    board = NoticeBoard(True)
    board.show("")
    board.show("")
    assert shown == []
    board.show("the pool <team> restarts")
    board.notice("it is back")
    eventually(lambda: len(shown) == 2, what="the notice is shown")
    board.show("")
    board.show("")
    texts = [output["data"]["text/plain"] for output in shown]
    assert texts == ["sgpu: the pool <team> restarts", "sgpu: it is back", ""]
    assert "sgpu: the pool &lt;team&gt; restarts" in shown[0]["data"]["text/html"]
    assert shown[2]["data"]["text/html"] == ""
    assert [output["update"] for output in shown] == [False, True, True]
    assert len({output["transient"]["display_id"] for output in shown}) == 1
    # the next notice gets its own output
    board.show("again")
    assert (shown[3]["update"], shown[3]["transient"] != shown[0]["transient"]) == (False, True)


def test_without_a_front_end_nothing_is_shown(shown: list[dict[str, Any]]):
    board = NoticeBoard(False)
    board.notice("the pool restarts")
    board.show("")
    assert shown == []


def test_uploads_are_one_line_in_a_notebook(shown: list[dict[str, Any]]):
    board = SendingBoard(True)
    for text in ("10 of 20 MB", "20 of 20 MB", ""):
        board.show(text)
    assert [output["data"]["text/plain"] for output in shown] == ["sgpu: 10 of 20 MB", "sgpu: 20 of 20 MB", ""]


def test_uploads_are_few_lines_in_a_terminal(capsys: pytest.CaptureFixture[str]):
    board = SendingBoard(False)
    for text in ("10 of 20 MB", "11 of 20 MB", ""):
        board.show(text)
    assert capsys.readouterr().err == "sgpu: 10 of 20 MB\n"
    other = SendingBoard(False, line_interval_s=0.0)
    other.show("1")
    other.show("2")
    assert capsys.readouterr().err == "sgpu: 1\nsgpu: 2\n"


def test_a_removed_working_directory_is_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert working_directory() == os.path.realpath(tmp_path)
    tmp_path.rmdir()
    assert working_directory() == "/"


class Kernel:
    """A kernel's handlers of the control channel; `asynchronous` as of ipykernel 6."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.ended: list[object] = []
        self.control_handlers = {"shutdown_request": self._async_end if asynchronous else self._end}

    def _end(self, stream: object, ident: object, parent: object) -> None:
        self.ended.append(parent)

    async def _async_end(self, stream: object, ident: object, parent: object) -> None:
        self.ended.append(parent)

    def request(self, **content: bool) -> None:
        asyncio.run(self.control_handlers["shutdown_request"](None, None, {"content": content}))  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_restart_is_noticed_before_the_kernel_ends(asynchronous: bool):
    kernel, detached = Kernel(asynchronous=asynchronous), []
    own = kernel.control_handlers["shutdown_request"]
    pools: Any = SimpleNamespace(detach_all=detached.append)
    watch = watch_restarts(kernel, pools, detaches=True)
    assert watch is not None
    reported: list[int] = []
    watch.before = lambda: reported.append(len(kernel.ended))
    kernel.request(restart=False)
    assert (watch.asked.is_set(), detached, reported, len(kernel.ended)) == (False, [], [], 1)
    kernel.request(restart=True)
    assert (watch.is_asked(), len(detached), reported, len(kernel.ended)) == (True, 1, [1], 2)
    watch.remove()
    assert kernel.control_handlers["shutdown_request"] == own
    # a handler that another extension installed on top is kept
    again = watch_restarts(kernel, pools, detaches=False)
    assert again is not None
    kernel.control_handlers["shutdown_request"] = print  # type: ignore[assignment]
    again.remove()
    assert kernel.control_handlers["shutdown_request"] is print
    assert not again.is_asked()
    assert watch_restarts(SimpleNamespace(), pools, detaches=True) is None


def test_an_interrupt_while_a_restart_is_waited_for_is_none(monkeypatch: pytest.MonkeyPatch):
    watch = watch_restarts(Kernel(asynchronous=False), SimpleNamespace(), detaches=True)  # type: ignore[arg-type]
    assert watch is not None

    def interrupted(timeout: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.asked, "wait", interrupted)
    assert not watch.is_asked()
