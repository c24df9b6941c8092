"""Questions of front ends and the way their answers go back, also while a cell blocks the kernel's main thread.

A question comes by one of two ways. On ipykernel 7.1 and later JupyterLab sends a widget's messages to a thread of
their own (a subshell); 7.4 lets the kernel say which, so that front ends that know of no subshells are served too.
On every kernel there is the control channel, whose thread has to be free for interrupts: there only what takes a
moment is answered at once. The rest is done by one thread of ours, and its answer goes out from the thread that
brought the question: a ZeroMQ socket belongs to its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import msgspec

from sgpu_magic.views.live import messages
from sgpu_magic.views.live.messages import Answer, AskCancel, AskHello, Question, Refusal

REQUEST = "sgpu_request"
REPLY = "sgpu_reply"

Answerer = Callable[[Question], Answer]
Send = Callable[[dict[str, object]], None]
Taker = Callable[[object, Send], None]
"""Takes a question and what sends its answer, from any thread; returns at once."""

_MOST_TAKEN = 256
_AT_ONCE = (AskHello, AskCancel)
_CLOSED = "This view is not live any more: its run has ended, or another view has taken its place."


class Channels:
    """The open views of one kernel, and the ways to them.

    Args:
        kernel: The ipykernel.

    Attributes:
        serve_comms: A widget's messages are answered while a cell blocks if the front end sends them to a subshell.
        serve_every_comm: They are answered wherever it sends them.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # of the two below: a view may be opened by one thread while another closes the last one
        self._lock = threading.Lock()
        self._open: dict[str, Taker] = {}
        # those that are no widget
        self._served: dict[str, Taker] = {}
        # (model, number) of the newest questions: a widget asks on the other way too when an answer takes long
        self._taken: deque[tuple[str, object]] = deque(maxlen=_MOST_TAKEN)
        self._worker: ThreadPoolExecutor | None = None
        self._subshell = OwnSubshell(kernel)
        self.serve_comms, self.serve_every_comm = self._subshell.kernel_has_them, self._subshell.kernel_asks
        kernel.control_handlers[REQUEST] = self._from_control

    def opened(self, widget: Any, answer: Answerer) -> None:
        """Answer questions to this widget's model from now on.

        Args:
            widget: The ipywidget.
            answer: Called in one of several threads; it must not print.
        """
        self._listen(widget, partial(self._ask, answer))

    def opened_for(self, widget: Any, take: Taker) -> None:
        """Have this widget's custom messages taken by `take` from now on, each once; `closed` ends that."""

        def once(content: object, send: Send) -> None:
            if not self._is_taken(widget.model_id, content):
                take(content, _from_any_thread(send))

        self._listen(widget, once)

    def serve(self, model_id: str, take: Taker | None) -> None:
        """Have questions to a model that is no widget taken by `take` from now on; by nobody when it is None."""
        with self._lock:
            self._served.pop(model_id, None)
            if take is not None:
                self._served[model_id] = lambda content, send: take(content, _from_any_thread(send))

    def take(self, comm: Any) -> None:
        """Have what the front end says to this comm handled where the cell does not block."""
        self._subshell.take(comm)

    def closed(self, widget: Any) -> None:
        """Answer no more questions to this widget, which is about to be closed."""
        widget.on_msg(self._from_comm, remove=True)
        with self._lock:
            self._open.pop(widget.model_id, None)
            if not self._open:
                self._rest()

    def remove(self) -> None:
        """Give the kernel its channels back."""
        if self._kernel.control_handlers.get(REQUEST) == self._from_control:
            del self._kernel.control_handlers[REQUEST]
        with self._lock:
            self._open.clear()
            self._served.clear()
            self._rest()

    def _listen(self, widget: Any, take: Taker) -> None:
        with self._lock:
            self._open[widget.model_id] = take
        self._subshell.take(widget.comm)
        widget.on_msg(self._from_comm)

    def _rest(self) -> None:
        """Nobody asks: keep no thread for it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=False, cancel_futures=True)
        self._subshell.drop()

    # ------------------------------------------------------------ the ways

    def _from_comm(self, widget: Any, content: object, buffers: object) -> None:
        """Runs in a subshell's thread, or in the main thread when nothing blocks it."""
        self._take(widget.model_id, content, widget.send)

    async def _from_control(self, stream: Any, ident: Any, parent: Any) -> None:
        """Runs in the control channel's thread."""

        def send(answer: dict[str, object]) -> None:
            reply = {"status": "ok", "answer": answer}
            self._kernel.session.send(stream, REPLY, reply, parent, ident)

        asked = parent["content"]
        self._take(str(asked.get("model_id")), asked.get("question"), send)

    def _take(self, model_id: str, content: object, send: Send) -> None:
        """Answer now or soon; `send` is called in this thread."""
        take = self._open.get(model_id) or self._served.get(model_id)
        if take is not None:
            take(content, send)
        elif (question := _question_of(content, send)) is not None:
            send(messages.to_builtins(Refusal(n=question.n, text=_CLOSED)))

    def _is_taken(self, model_id: str, content: object) -> bool:
        """Whether this widget's question has come before, on the other way; it is answered there, once."""
        number = _number_of(content)
        with self._lock:
            if (model_id, number) in self._taken:
                return True
            if number is not None:
                self._taken.append((model_id, number))
            return False

    def _ask(self, answer: Answerer, content: object, send: Send) -> None:
        question = _question_of(content, send)
        if isinstance(question, _AT_ONCE):
            send(self._answered(answer, question))
        elif question is not None:
            self._hand_over(answer, question, send)

    def _hand_over(self, answer: Answerer, question: Question, send: Send) -> None:
        send_here = _from_any_thread(send)

        def work() -> None:
            send_here(self._answered(answer, question))

        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="sgpu-answers")
            self._worker.submit(work)

    def _answered(self, answer: Answerer, question: Question) -> dict[str, object]:
        try:
            return messages.to_builtins(answer(question))
        except Exception as error:
            # a thread's top, and a front end that waits
            self._kernel.log.exception("sgpu-magic can't answer %r", question)
            text = f"This can't be answered: {type(error).__name__}: {error}"
            return messages.to_builtins(Refusal(n=question.n, text=text))


def _number_of(content: object) -> object:
    return cast("dict[str, object]", content).get("n") if isinstance(content, dict) else None


def _question_of(content: object, send: Send) -> Question | None:
    """Return a run view's question, None for what is none, which is said."""
    try:
        return messages.question_of(content)
    except msgspec.ValidationError as error:
        if isinstance(number := _number_of(content), int):
            send(messages.to_builtins(Refusal(n=number, text=f"This is no question that can be answered: {error}")))
        return None


def _from_any_thread(send: Send) -> Send:
    """Return what sends from this thread, which runs a loop, whichever calls it."""
    loop = asyncio.get_running_loop()
    # with the context of the question, which names its message as the answer's parent
    context = contextvars.copy_context()

    def send_here(answer: dict[str, object]) -> None:
        # a loop that is closed by now belonged to a subshell that nobody needs any more
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(partial(send, answer), context=context)

    return send_here


class OwnSubshell:
    """A subshell for widgets' messages that their front end has sent to the main shell.

    ipykernel 7.4 asks a comm which shell shall handle a message for it. By itself it would say: the one that last
    published on it, which is the one that the cell blocks.

    Args:
        kernel: The ipykernel.

    Attributes:
        kernel_has_them: It has subshells.
        kernel_asks: It asks a comm for the shell.
    """

    def __init__(self, kernel: Any) -> None:
        # where a kernel is, this has been imported; a terminal shall not pay for it
        from ipykernel.comm.comm import BaseComm

        # None on ipykernel 6
        self._thread: Any = getattr(kernel, "shell_channel_thread", None)
        self.kernel_has_them = self._thread is not None
        self.kernel_asks = self.kernel_has_them and hasattr(BaseComm, "_reply_subshell_for")
        self._id: str | None = None

    def take(self, comm: Any) -> None:
        """Have messages for this comm handled where the cell does not block."""
        if self.kernel_asks:
            comm._reply_subshell_for = self._route

    def drop(self) -> None:
        """End its thread. Views that are open must not be left."""
        subshell, self._id = self._id, None
        if subshell is not None:
            self._thread.io_loop.add_callback(partial(_delete, self._thread.manager, subshell))

    def _route(self, data: object, asked: str | None) -> str | None:
        """Runs in the shell channel's thread, the one that may start subshells."""
        if asked is None and self._id is None:
            create = getattr(self._thread.manager, "_create_subshell", None)
            self._id = create() if create is not None else None
        return asked if asked is not None else self._id


def _delete(manager: Any, subshell: str) -> None:
    # its thread may have ended with the kernel
    with contextlib.suppress(RuntimeError):
        manager._delete_subshell(subshell)
