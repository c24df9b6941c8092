"""The kernel's side of a panel: reports the notebook's state, plans and applies a choice, connects and disconnects.

All requests run in their own threads, because cells may be running, and print nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.options.option_records import SessionOptions
from sgpu_magic.packages import snapshot
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.packages.snapshot import versions
from sgpu_magic.panel.format_plan import panel_plan
from sgpu_magic.panel.kernel_state import (
    AskApply,
    AskDisconnect,
    AskKernel,
    AskPlan,
    AskVariables,
    KernelAnswer,
    KernelQuestion,
    KernelReply,
    PanelRefusal,
    PlanAnswer,
    VariablesAnswer,
    kernel_snapshot,
)
from sgpu_magic.panel.plan import Plan, Restart, living, plan
from sgpu_magic.panel.pool_state import as_sentence, format_failure
from sgpu_magic.panel.variables import panel_variables
from sgpu_magic.runs.choice.packages import install
from sgpu_magic.runs.choice.schema import Choice, KeptChoice, describe_choice
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit import target
from sgpu_magic.wire.decoding import convert

T = TypeVar("T")

ANSWER_S = 45.0
"""After this time a request is answered with "packages are being installed"."""
_END_S = 30.0
_BUSY = "Another choice is being applied. Apply this one when that has finished."


class KernelActions:
    """Answers a panel's requests. Thread-safe; methods may block.

    Args:
        context: The kernel's context.
    """

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._job: Future[tuple[KeptChoice, str]] | None = None
        self._applying = threading.Lock()
        # held while a session is ended or started here
        self._connecting = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        """Connect nothing from now on; an installation in progress continues to its end."""
        self._closed.set()

    def answered(self, content: object, *, knows_metadata: bool = True) -> dict[str, Any]:
        """Return the reply to a request, both as JSON; errors become a refusal.

        Args:
            content: The request.
            knows_metadata: As in `KernelEndpoint.take`.
        """
        number = cast("dict[str, object]", content).get("n") if isinstance(content, dict) else None
        number = number if isinstance(number, int) else 0
        try:
            reply = self.answer(convert(content, KernelQuestion), knows_metadata=knows_metadata)
        except Exception as error:  # noqa: BLE001  a thread's top, and a front end that waits
            reply = PanelRefusal(n=number, text=format_failure(error))
        return cast("dict[str, Any]", msgspec.to_builtins(reply))

    def answer(self, question: KernelQuestion, *, knows_metadata: bool = True) -> KernelReply:
        """Answer a request.

        Raises:
            SgpuError: The request can't be carried out.
            OSError: A file can't be written.
        """
        match question:
            case AskKernel():
                kept = self._context.choice.to_report(question.kept) if knows_metadata else None
                self._raise_failure()
                return self._state(question.n, kept)
            case AskPlan():
                held = self._context.choice.now()
                planned = plan(self._context, held, question.choice, connect=question.connect)
                return PlanAnswer(n=question.n, plan=panel_plan(planned))
            case AskApply():
                if not self._applying.acquire(blocking=False):
                    raise UsageError(_BUSY)
                try:
                    return self._apply(question)
                finally:
                    self._applying.release()
            case AskDisconnect():
                return self._disconnect(question)
            case AskVariables():
                return VariablesAnswer(n=question.n, variables=panel_variables(living("")))

    # ------------------------------------------------------------ state

    def _state(self, number: int, kept: KeptChoice | None = None, text: str = "") -> KernelAnswer:
        held = self._context.choice.now()
        installing = self._is_installing()
        snapshot = kernel_snapshot(self._context, held)
        return KernelAnswer(n=number, snapshot=snapshot, kept=kept, notice=text, installing=installing)

    def _is_installing(self) -> bool:
        with self._lock:
            return self._job is not None and not self._job.done()

    def _raise_failure(self) -> None:
        """Raise, once, the error of a failed installation that was not reported yet."""
        with self._lock:
            job = self._job
            if job is None or not job.done():
                return
            self._job = None
        job.result()

    # ------------------------------------------------------------ actions

    def _apply(self, question: AskApply) -> KernelAnswer:
        if self._is_installing():
            raise UsageError(_BUSY)
        held = self._context.choice.now()
        planned = plan(self._context, held, question.choice, connect=question.connect, resolve=False)
        if planned.problem is not None:
            raise UsageError(as_sentence(planned.problem.message))
        if planned.loses and not question.confirmed:
            raise UsageError(f"{' '.join(panel_plan(planned).sentences)} Nothing was done: confirm first.")
        if not planned.changes_packages:
            kept, text = self._carry_out(planned, question.choice)
            return self._state(question.n, kept, text)
        job = _in_background(lambda: self._carry_out(planned, question.choice))
        with self._lock:
            self._job = job
        if not wait((job,), ANSWER_S).done:
            return self._state(question.n, text="Packages are being installed.")
        self._raise_failure()
        kept, text = job.result()
        return self._state(question.n, kept, text)

    def _carry_out(self, planned: Plan, choice: Choice) -> tuple[KeptChoice, str]:
        """Carry out a plan; return the choice to write to the metadata, and what happened.

        Raises:
            SgpuError: The plan can't be carried out.
            OSError: The key can't be written.
        """
        texts = installed(self._context, planned.packages.added, planned.packages.removed)
        kept = accept(self._context, choice)
        if planned.connects:
            with self._connecting:
                # the extension may have been unloaded meanwhile
                if not self._closed.is_set():
                    texts.append(self._connect(planned.restart))
        return kept, " ".join(texts)

    def _connect(self, restart: Restart | None) -> str:
        if restart is not None:
            before = restart.session
            # refuse an impossible session before the old one is ended
            target.with_choice(self._context, SessionOptions())
            end(before, "the panel connected another session in its place", wait_s=_END_S)
            if not before.has_ended:
                raise UsageError(
                    f"Session {before.name} was asked to end but has not ended yet, so no new session was connected. "
                    "Connect again when it has ended."
                )
        session = registry.begin(self._context, SessionOptions(), "none", of_cell=False)
        return f"%%distributed cells run in session {session.name} from now on."

    def _disconnect(self, question: AskDisconnect) -> KernelAnswer:
        with self._connecting:
            session = living(question.name)
            if session is None:
                what = f"session {question.name!r}" if question.name else "session"
                raise UsageError(f"This notebook has no {what} to end.")
            end(session, "it was ended in the panel")
        ended = "has ended" if session.has_ended else "is ending"
        return self._state(question.n, text=f"Session {session.name} {ended}.")


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Run a long task in its own thread."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001  a thread's top; the next request reports it
            outcome.set_exception(error)

    threading.Thread(target=run, name="sgpu-panel-installs", daemon=True).start()
    return outcome


def installed(context: KernelContext, added: Sequence[str], removed: Sequence[str]) -> list[str]:
    """Install and remove packages in this environment, if any; return sentences about what was done."""
    if added or removed:
        install(context.pool.settings, added, removed)
    done = ((added, "installed"), (removed, "removed"))
    return [f"{', '.join(names)} {word}." for names, word in done if names]


def accept(context: KernelContext, choice: Choice) -> KeptChoice:
    """Confirm a choice whose packages are installed; return the choice to write to the metadata."""
    if not choice.env_version:
        # its packages are in the notebook's environment now
        choice = msgspec.structs.replace(choice, dependencies=(), removed=())
    return context.choice.confirm(choice)


def end(session: Session, reason: str, wait_s: float = 0.0) -> None:
    """End a session, remove it from the registry, and release its resources in this process.

    Args:
        session: The session.
        reason: The reason that its cells and its log give.
        wait_s: Seconds to wait for its end; a session that has not ended by then stays registered. 0 does not wait.
    """
    session.end(reason)
    if wait_s and not session.wait_for_end(wait_s):
        return
    session.close()
    registry.drop(session)


def accept_choice(context: KernelContext) -> str:
    """Confirm the notebook's choice, install what it asks for here, and return what was done.

    Raises:
        UsageError: There is nothing to confirm, or it is not possible here.
        EnvironmentFailed: Its packages can't be installed.
    """
    held = context.choice.now()
    choice = held.choice
    if choice is None:
        raise UsageError(held.problem or "this notebook's metadata asks for nothing, so there is nothing to confirm.")
    words = describe_choice(choice, target.pool_name(context))
    if held.confirmed:
        return f"this notebook asks for {words}; this is already confirmed."
    planned = plan(context, held, choice, connect=False, resolve=False)
    if planned.problem is not None:
        raise UsageError(as_sentence(planned.problem.message))
    text = installed(context, planned.packages.added, ())
    accept(context, choice)
    if not choice.env_version and choice.removed:
        # packages to be removed are the user's, and may be needed elsewhere
        there = [name for name in choice.removed if normalised(name) in versions(snapshot.take_snapshot())]
        if there:
            text.append(f"Still installed: {', '.join(there)}. `%pip uninstall {' '.join(there)}` removes it.")
    return " ".join(
        [f"confirmed: this notebook asks for {words}, and a bare %%distributed uses that from now on.", *text]
    )
