"""A stand-in for a browser's side of a run's live view, as the kernel sees it.

FrontEnd   the models of one kernel's widgets, and the channels to send questions about them
LiveView   one model: the last snapshot, the lines and the answers that it has received
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from queue import Empty
from typing import Any

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_ASK_LINES = 500


@dataclass
class Sent:
    """A message from the kernel to a model, with its time of day."""

    kind: str
    data: dict[str, Any]
    size: int
    at: float


@dataclass
class LiveView:
    """One widget's model.

    Args:
        model_id: Its comm's id.
        state: The synced traits.
        opened_at: When its comm was opened, monotonic.

    Attributes:
        reported: The first line's number and the line count of each message of new lines.
        hears: Callback that also gets each message, for a page that draws the widget.
    """

    model_id: str
    state: dict[str, Any]
    opened_at: float
    closed_at: float | None = None
    lines: dict[int, tuple[int, str]] = field(default_factory=dict)
    skipped: int = 0
    reported: list[tuple[int, int]] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    hello_seq: int | None = None
    hears: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def snapshot(self) -> dict[str, Any]:
        return self.state.get("snapshot", {})

    @property
    def text(self) -> str:
        """Return all that is drawn, as text."""
        now = self.snapshot
        if not now:
            return ""
        header = " · ".join([now["name"], now["state"], now["devices"], now["pool"], now["attempt"], *now["meta"]])
        failure = [line["text"] for line in now["failure"]["lines"]] if now["failure"] else []
        lines = [f"[{rank}] {text}" for _, (rank, text) in sorted(self.lines.items())]
        # the grid has each rank's last line even if the log omitted it
        last = [f"[{card['rank']}] {card['last']}" for card in now["ranks"] if card["last"]]
        lines += [line for line in last if line not in lines]
        idle = [card["idle"] for card in now["ranks"] if card["idle"]]
        words = [*now["preparing"], *now["notes"], *now["stall"], *now["idle"], *idle]
        return "\n".join([header, *words, *lines, *failure, *now["footer"]])

    def take(self, data: Mapping[str, Any], size: int, at: float) -> str:
        """Handle a message from the kernel; return the kind of a custom one."""
        if self.hears is not None:
            self.hears(data)
        if data["method"] == "update":
            self.sent.append(Sent("update", dict(data), size, at))
            snapshot = data["state"].get("snapshot")
            if snapshot is None or snapshot["seq"] >= self.snapshot.get("seq", 0):
                self.state.update(data["state"])
            return "update"
        content = data["content"]
        self.sent.append(Sent(content["kind"], content, size, at))
        self.take_content(content)
        return content["kind"]

    def take_content(self, content: dict[str, Any]) -> None:
        """Handle new content or an answer."""
        if content["kind"] == "lines":
            self.seqs.append(content["seq"])
            self.reported.append((content["first"], self._put(content["first"], content["rows"])))
            return
        self.answers[content.get("n", 0)] = content
        if content["kind"] == "lines-answer":
            self._put(content["first"], content["rows"])
        elif content["kind"] == "hello":
            self.hello_seq = content["seq"]
            if content["snapshot"]["seq"] >= self.snapshot.get("seq", 0):
                self.state["snapshot"] = content["snapshot"]

    def _put(self, first: int, rows: list[list[Any]]) -> int:
        """Keep lines; return their number including skipped ones."""
        began = first
        for row in rows:
            rank, text = row[0], row[2]
            if isinstance(text, int):
                # that many lines were left out
                self.skipped += text
                first += text
            else:
                self.lines[first] = (rank, text)
                first += 1
        return first - began


@dataclass
class Model:
    """A widget other than a live view, such as one created on a rank: its state, and whether it is open."""

    model_id: str
    state: dict[str, Any]
    is_open: bool = True
    updates: int = 0


class FrontEnd:
    """The models of one kernel's widgets.

    Args:
        client: The kernel's started `jupyter_client` client.
        greets: Whether to greet each view over the control channel, as JupyterLab does.
    """

    def __init__(self, client: Any, *, greets: bool = True) -> None:
        self.client = client
        self.greets = greets
        self.views: dict[str, LiveView] = {}
        self.models: dict[str, Model] = {}
        self._number = 0
        self._subshell = ""
        self._control: dict[str, dict[str, Any]] = {}
        self._asked_of: dict[str, LiveView] = {}

    @property
    def view(self) -> LiveView:
        """Return the newest live view."""
        return list(self.views.values())[-1]

    # ------------------------------------------------------------ taking

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle one iopub message."""
        kind, content = message["msg_type"], message["content"]
        if not kind.startswith("comm_"):
            return
        view, now = self.views.get(content["comm_id"]), time.monotonic()
        sent_at = message["header"]["date"]
        if isinstance(sent_at, str):
            sent_at = datetime.fromisoformat(sent_at)
        size = len(json.dumps(content))
        if kind == "comm_open" and "model_key" in content["data"].get("state", {}):
            view = self.views[content["comm_id"]] = LiveView(content["comm_id"], content["data"]["state"], now)
            if self.greets:
                self.ask(view, {"kind": "hello", "over": "control"})
        elif kind == "comm_msg" and view is not None:
            view.take(content["data"], size, sent_at.timestamp())
        elif kind == "comm_close" and view is not None:
            view.closed_at = now
        elif view is None:
            self._take_other(kind, content)

    def _take_other(self, kind: str, content: Mapping[str, Any]) -> None:
        comm_id, data = content["comm_id"], content["data"]
        if kind == "comm_open" and "state" in data:
            self.models[comm_id] = Model(comm_id, data["state"])
        elif (model := self.models.get(comm_id)) is not None:
            if kind == "comm_close":
                model.is_open = False
            elif data["method"] == "update":
                model.state.update(data["state"])
                model.updates += 1

    def set(self, model: Model, over: str = "shell", **state: Any) -> None:
        """Change traits of a model, as when a user moves a slider.

        Args:
            model: The model.
            over: As for `ask`.
            state: The traits.
        """
        model.state.update(state)
        self._send(model.model_id, {"method": "update", "state": state, "buffer_paths": []}, over)

    def say(self, model: Model | LiveView, content: dict[str, Any], over: str = "shell") -> None:
        """Send a custom message, as a pressed button does."""
        self._send(model.model_id, {"method": "custom", "content": content}, over)

    def _send(self, model_id: str, data: dict[str, Any], over: str) -> None:
        message = self.client.session.msg("comm_msg", {"comm_id": model_id, "data": data})
        if over == "subshell":
            message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)

    def take_replies(self) -> None:
        """Handle the messages received on the control channel."""
        while True:
            try:
                message = self.client.get_control_msg(timeout=0)
            except Empty:
                return
            msg_id, answer = message["parent_header"].get("msg_id", ""), message["content"].get("answer")
            view = self._asked_of.pop(msg_id, None)
            if view is None or answer is None:
                self._control[msg_id] = message["content"]
                continue
            view.take_content(answer)
            if answer["kind"] == "hello" and (total := sum(answer["snapshot"]["lines"])):
                first = max(total - _ASK_LINES, 0)
                self.ask(view, {"kind": "lines", "first": first, "count": _ASK_LINES, "rank": None})

    # ------------------------------------------------------------ asking

    def ask(self, view: LiveView, question: dict[str, Any], over: str = "control") -> int:
        """Send a question. Returns its number, under which the answer will be in `view.answers`.

        Args:
            view: The view.
            question: The question without its number.
            over: `control`, `subshell`, or `shell` (a front end without subshells).
        """
        self._number += 1
        question = {**question, "n": self._number}
        if over == "control":
            content = {"model_id": view.model_id, "question": question}
            message = self.client.session.msg("sgpu_request", content)
            self._asked_of[message["header"]["msg_id"]] = view
            self.client.control_channel.send(message)
            return self._number
        self._send(view.model_id, {"method": "custom", "content": question}, over)
        return self._number

    @property
    def subshell(self) -> str:
        """Return the subshell that JupyterLab would use for widgets; created on first use."""
        if not self._subshell:
            self._subshell = self.control("create_subshell_request", {})["subshell_id"]
        return self._subshell

    def drop_subshell(self) -> None:
        """Delete the subshell, as JupyterLab does when it closes the notebook."""
        if self._subshell:
            self.control("delete_subshell_request", {"subshell_id": self._subshell})
            self._subshell = ""

    def control(self, kind: str, content: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        """Send a control message and return its reply's content."""
        return self.begin_control(kind, content)(timeout_s)

    def begin_control(self, kind: str, content: dict[str, Any]) -> Callable[[float], dict[str, Any]]:
        """Send a control message and return a function that waits the given seconds for its reply's content."""
        message = self.client.session.msg(kind, content)
        self.client.control_channel.send(message)
        msg_id = message["header"]["msg_id"]
        return lambda timeout_s: self.until(lambda: self._control.pop(msg_id, None), timeout_s, f"the reply to {kind}")

    def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Handle control replies until the condition holds."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
            self.take_replies()
        return value
