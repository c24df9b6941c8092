"""Requests of front ends and their replies, also while a cell blocks the kernel's main thread.

A request arrives by one of two ways. With ipykernel 7.1 and later JupyterLab sends a widget's messages to a separate
thread, a subshell; 7.4 lets the kernel choose it, so that front ends without support for subshells are served too.
Every kernel has the control channel, whose thread must stay free for interrupts, so only quick requests are answered
there at once. A worker thread answers the others, and the reply is sent from the thread that received the request,
as a ZeroMQ socket belongs to its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from sgpu_magic.system.serial_threads import SerialExecutor
from sgpu_magic.views.live.messages import Answer, AskCancel, AskHello, Question, Refusal
from sgpu_magic.wire.decoding import convert

REQUEST = "sgpu_request"
REPLY = "sgpu_reply"

Answerer = Callable[[Question], Answer]
Send = Callable[[dict[str, object]], None]
Taker = Callable[[object, Send], None]
"""Takes a request and a function that sends its reply from any thread; returns at once."""

_MOST_TAKEN = 256
_AT_ONCE = (AskHello, AskCancel)
_CLOSED = "This view is no longer live: its run has ended, or another view has replaced it."


class Channels:
    """The open views of one kernel, and the channels to them.

    Args:
        kernel: The ipykernel.

    Attributes:
        serve_comms: Widget messages that the front end sends to a subshell are answered while a cell blocks.
        serve_every_comm: All widget messages are answered while a cell blocks.
        is_restarting: Whether a restart of the kernel was requested. Its front ends have forgotten all comms by then,
            and JupyterLab logs an error for each that is closed.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # protects the next two: one thread may open a view while another closes the last one
        self._lock = threading.Lock()
        self._open: dict[str, Taker] = {}
        # models that are not widgets
        self._served: dict[str, Taker] = {}
        # (model, number) of the newest requests: a widget repeats a request on the other channel if a reply takes long
        self._taken: deque[tuple[str, object]] = deque(maxlen=_MOST_TAKEN)
        self._answers = SerialExecutor("sgpu-answers")
        self._subshell = OwnSubshell(kernel)
        self.serve_comms, self.serve_every_comm = self._subshell.kernel_has_them, self._subshell.kernel_asks
        self.is_restarting: Callable[[], bool] = lambda: False
        kernel.control_handlers[REQUEST] = self._from_control

    def add_widget(self, widget: Any, answer: Answerer) -> None:
        """Answer requests to this widget's model from now on.

        Args:
            widget: The ipywidget.
            answer: Called in one of several threads; it must not print.
        """
        self._listen(widget, partial(self._ask, answer))

    def opened_for(self, widget: Any, take: Taker) -> None:
        """Pass this widget's custom messages to `take` from now on, each once; `closed` ends that."""

        def once(content: object, send: Send) -> None:
            if not self._is_taken(widget.model_id, content):
                take(content, _from_any_thread(send))

        self._listen(widget, once)

    def serve(self, model_id: str, take: Taker | None) -> None:
        """Pass requests to a model that is not a widget to `take` from now on; None ends that."""
        with self._lock:
            self._served.pop(model_id, None)
            if take is not None:
                self._served[model_id] = lambda content, send: take(content, _from_any_thread(send))

    def handle_in_subshell(self, comm: Any) -> None:
        """Have the front end's messages to this comm handled in a thread that the cell does not block."""
        self._subshell.handle_in_subshell(comm)

    def closed(self, widget: Any) -> None:
        """Stop answering requests to this widget, which is about to be closed."""
        widget.on_msg(self._from_comm, remove=True)
        with self._lock:
            self._open.pop(widget.model_id, None)
            if not self._open:
                self._end_subshell()

    def remove(self) -> None:
        """Remove all handlers from the kernel."""
        if self._kernel.control_handlers.get(REQUEST) == self._from_control:
            del self._kernel.control_handlers[REQUEST]
        with self._lock:
            self._open.clear()
            self._served.clear()
            self._end_subshell()

    def _listen(self, widget: Any, take: Taker) -> None:
        with self._lock:
            self._open[widget.model_id] = take
        self._subshell.handle_in_subshell(widget.comm)
        widget.on_msg(self._from_comm)

    def _end_subshell(self) -> None:
        """End the subshell and drop waiting requests, as no view is open."""
        self._answers.drop()
        self._subshell.drop()

    # ------------------------------------------------------------ channels

    def _from_comm(self, widget: Any, content: object, buffers: object) -> None:
        """Handle a widget's message, in a subshell's thread, or in the main thread when nothing blocks it."""
        self._on_message(widget.model_id, content, widget.send)

    async def _from_control(self, stream: Any, ident: Any, parent: Any) -> None:
        """Handle a request in the control channel's thread."""

        def send(answer: dict[str, object]) -> None:
            self._kernel.session.send(stream, REPLY, {"status": "ok", "answer": answer}, parent, ident)

        asked = parent["content"]
        self._on_message(str(asked.get("model_id")), asked.get("question"), send)

    def _on_message(self, model_id: str, content: object, send: Send) -> None:
        """Answer a request now or later; `send` is called in this thread."""
        take = self._open.get(model_id) or self._served.get(model_id)
        if take is not None:
            take(content, send)
        elif (question := question_of(content, send)) is not None:
            send(msgspec.to_builtins(Refusal(n=question.n, text=_CLOSED)))

    def _is_taken(self, model_id: str, content: object) -> bool:
        """Whether this widget's request has arrived before on the other channel, where it is answered."""
        number = _number_of(content)
        with self._lock:
            is_taken = (model_id, number) in self._taken
            if not is_taken and number is not None:
                self._taken.append((model_id, number))
            return is_taken

    def _ask(self, answer: Answerer, content: object, send: Send) -> None:
        question = question_of(content, send)
        if isinstance(question, _AT_ONCE):
            send(self._answered(answer, question))
        elif question is not None:
            send_here = _from_any_thread(send)
            self._answers.put(lambda: send_here(self._answered(answer, question)))

    def _answered(self, answer: Answerer, question: Question) -> dict[str, object]:
        try:
            return msgspec.to_builtins(answer(question))
        except Exception as error:
            # top of a thread, and a front end waits for a reply
            self._kernel.log.exception("sgpu-magic can't answer %r", question)
            text = f"The request failed: {type(error).__name__}: {error}"
            return msgspec.to_builtins(Refusal(n=question.n, text=text))


def _number_of(content: object) -> object:
    return cast("dict[str, object]", content).get("n") if isinstance(content, dict) else None


def question_of(content: object, send: Send) -> Question | None:
    """Return a run view's request; refuse anything else and return None."""
    try:
        return convert(content, Question)
    except msgspec.DecodeError as error:
        if isinstance(number := _number_of(content), int):
            send(msgspec.to_builtins(Refusal(n=number, text=f"This request is not valid: {error}")))
        return None


def _from_any_thread(send: Send) -> Send:
    """Return a function that any thread can call to send from this thread, which runs an event loop."""
    loop = asyncio.get_running_loop()
    # the request's context sets its message as the reply's parent
    context = contextvars.copy_context()

    def send_here(answer: dict[str, object]) -> None:
        # a closed loop belonged to a subshell that has been ended
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(partial(send, answer), context=context)

    return send_here


class OwnSubshell:
    """A subshell for widget messages that their front end sends to the main shell.

    ipykernel 7.4 asks a comm which shell handles its messages. By default it is the one that last published on the
    comm, which is the one that the cell blocks.

    Args:
        kernel: The ipykernel.

    Attributes:
        kernel_has_them: The kernel has subshells.
        kernel_asks: The kernel asks a comm for the shell.
    """

    def __init__(self, kernel: Any) -> None:
        # imported late: a kernel has imported it already, a terminal does not need it
        from ipykernel.comm.comm import BaseComm

        # None on ipykernel 6
        self._thread: Any = getattr(kernel, "shell_channel_thread", None)
        self.kernel_has_them = self._thread is not None
        self.kernel_asks = self.kernel_has_them and hasattr(BaseComm, "_reply_subshell_for")
        self._id: str | None = None

    def handle_in_subshell(self, comm: Any) -> None:
        """Have messages to this comm handled in the subshell."""
        if self.kernel_asks:
            comm._reply_subshell_for = self._route

    def drop(self) -> None:
        """End its thread. No view may be open."""
        subshell, self._id = self._id, None
        if subshell is not None:
            self._thread.io_loop.add_callback(partial(_delete, self._thread.manager, subshell))

    def _route(self, data: object, asked: str | None) -> str | None:
        """Return the shell for a message; called in the shell channel's thread, which may create subshells."""
        if asked is None and self._id is None:
            self._id = getattr(self._thread.manager, "_create_subshell", lambda: None)()
        return asked if asked is not None else self._id


def _delete(manager: Any, subshell: str) -> None:
    # its thread may have ended with the kernel
    with contextlib.suppress(RuntimeError):
        manager._delete_subshell(subshell)
