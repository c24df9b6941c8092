"""The state that all runs of one process share: pools, views, detached runs, handling of restarts."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from sgpu_magic.client import find_run
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pool_choosing import KINDS
from sgpu_magic.client.pools import Pools
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import ClientRun
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.options import notebook_job
from sgpu_magic.options.option_records import Devices
from sgpu_magic.runs import packages
from sgpu_magic.runs.choice.keeper import keeper_of
from sgpu_magic.runs.follow import outcome
from sgpu_magic.runs.follow.outcome import Interrupts, Names
from sgpu_magic.runs.follow.run_loop import EventPump, OnEnd, Subscription
from sgpu_magic.runs.follow.run_notifier import RunNotifier
from sgpu_magic.runs.kernel_restarts import watch_restarts
from sgpu_magic.runs.notebook import publish
from sgpu_magic.runs.notices import Background, NoticeBoard, SendingBoard
from sgpu_magic.runs.submit import target
from sgpu_magic.runs.submit.spec import Submission
from sgpu_magic.runs.submit.submit import interrupted, release
from sgpu_magic.runs.submit.target import ResolvedTarget
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.live_views import Buttons, LiveViews
from sgpu_magic.views.publisher import SilentPublisher
from sgpu_magic.views.run_notes import stop_texts
from sgpu_magic.views.stacks import stacks_text
from sgpu_magic.wire.base import CancelReason, RunState, short
from sgpu_magic.wire.events import RunEnded


class KernelContext:
    """The runs of one process: a kernel, a terminal or a script.

    Args:
        shell: The IPython shell; None in a plain Python program.

    Attributes:
        settings: The settings when the object was created; the pool's directories do not change.
        progress: Shows the progress of long steps before a run is submitted.
        pools: All pools that may be used, each connected on first use.
        pool: The local pool, started on first use.
        follower: Follows runs in the background while the program continues.
        notifier: Runs the command of the setting `notify` when a run ends that this process submitted.
        detached: Ids of runs that this process submitted and detached.
        restarts: Detects a restart of the kernel; None if there is no kernel.
        choice: The notebook's own choice of devices and packages.
    """

    def __init__(self, shell: Any = None) -> None:
        kernel = getattr(shell, "kernel", None)
        self.shell = shell
        self.settings = load_settings()
        self.notices = NoticeBoard(kernel is not None)
        self.progress = SendingBoard(kernel is not None)
        self.pools = Pools(self.settings, self.notices.notice, self.progress.show)
        self.pool = self.pools.local
        self.live_views = LiveViews(kernel)
        # views of active runs that no cell waits for
        self._windows: dict[str, Background] = {}
        self.detached: set[str] = set()
        self.type_notes: set[str] = set()
        self.follower = EventPump()
        self.notifier = RunNotifier(load_settings)
        self.restarts = watch_restarts(kernel, self.pools, detaches=self.settings.detach_on_restart)
        if self.restarts is not None and self.live_views.channels is not None:
            self.live_views.channels.is_restarting = self.restarts.asked.is_set
        self.choice = keeper_of(self.settings.state_path, shell)

    @property
    def is_notebook(self) -> bool:
        """Whether the front end displays HTML: true for Jupyter kernels except in consoles."""
        return getattr(self.shell, "kernel", None) is not None and not self.live_views.is_console

    @property
    def namespace(self) -> dict[str, Any]:
        """The notebook's variables, or those of `__main__` in a plain program."""
        return self.shell.user_ns if self.shell is not None else sys.modules["__main__"].__dict__

    def close(self) -> None:
        """Stop the background work and close the links; the pools keep running for other clients."""
        if self.restarts is not None:
            self.restarts.remove()
        for window in self._windows.values():
            window.stop()
        self.follower.close()
        self.notifier.close()
        self.live_views.close()
        for pool in self.pools.used_pools():
            packages.close(pool)
        self.pools.close()

    def publish(self, text: str, rich: Mapping[str, object]) -> None:
        """Show the text and its other forms, by media type, below the cell; print the text outside of notebooks."""
        if self.is_notebook:
            publish({"text/plain": text, **rich})
        else:
            print(text)  # noqa: T201

    @contextlib.contextmanager
    def pinned_to_its_cell(self) -> Generator[None]:
        """Keep a thread's output with the cell that runs now; otherwise later cells would get it.

        ipykernel finds a thread's cell in a context variable, which threads that a program starts do not have.
        """
        pin: Any = getattr(self.shell, "set_thread_parent", None)
        if pin is None or threading.current_thread() is threading.main_thread():
            yield
            return
        tokens = pin(self.shell.parent_header)
        try:
            yield
        finally:
            self.shell.reset_thread_parent(tokens)

    def current_settings(self) -> Settings:
        """Read the settings again, since `%env` may have changed them."""
        return load_settings()

    def pool_of(self, run: ClientRun | Submission) -> Pool:
        """Return the pool that a run of this process is in, or goes to."""
        return self.pools.used_pool(run.pool)

    def wanted_pool(self, name: str) -> str:
        """Return the pool named by the options, else by the settings; "" if neither names one.

        Args:
            name: The pool, `reserved` or `on-demand` as given in the options; "" if not given.

        Raises:
            UsageError: There is no pool of that name.
        """
        name = name or self.current_settings().pool
        if name not in ("", LOCAL, *KINDS):
            self.pools.get(name)
        return name

    def resolve_target(self, name: str, devices: Devices) -> ResolvedTarget:
        """As `target.resolve_target`."""
        return target.resolve_target(self.pools, self.current_settings(), name, devices)

    def pool_with(self, run: str, *, only_active: bool = False) -> Pool:
        """Return the pool that has a run, by the first digits of its id; as `find_run.pool_with`."""
        return find_run.pool_with(self.pools, self.settings, run, only_active=only_active)

    def attach(self, run: str) -> tuple[ClientRun, RunState]:
        """Attach to a run of any pool; as `Pool.attach`."""
        return self.pool_with(run).attach(run)

    def followed(self, run: ClientRun, ui: str = "auto", *, error_follows: bool = True) -> Subscription:
        """Return a run with its view and the publisher that shows it.

        Args:
            run: The run.
            ui: `auto`, `widget`, `text` or `none`.
            error_follows: Whether the caller raises the run's error.
        """
        if ui == "auto":
            ui = notebook_job.of_process().ui or ui
        # headless clients print the error alone
        draws = self.live_views.is_watched and ui in ("auto", "widget")
        view = _view(run, self.current_settings(), error_follows=error_follows and draws)
        publisher = self.live_views.publisher_for(ui, view, sys.stdout, self._buttons(run))
        return Subscription(run, view, publisher, self.pool_of(run), on_end=self._on_end(run))

    def collect(
        self,
        run: ClientRun,
        ui: str,
        *,
        interrupts: Interrupts | None = None,
        into: Names | None = None,
        on_end: OnEnd | None = None,
    ) -> RunResult | None:
        """Show a run until it ends, set the names that it brings back, and return its result.

        Args:
            run: The run, just submitted. It is released here.
            ui: As in `followed`.
            interrupts: Interrupts of the session that it runs in; None for a run with its own ranks.
            into: Receives the names instead of the notebook.
            on_end: Called when this process is done with the run, whatever the outcome.

        Returns:
            The result; None if the run was detached.

        Raises:
            Exception: As `outcome.collect`.
        """
        try:
            # inside the try, because this creates the view: an interrupt now must not leave an unfollowed run
            try:
                followed = self.followed(run, ui)
            except KeyboardInterrupt:
                raise interrupted(run) from None
            try:
                if run.spec.detach:
                    outcome.abandon(followed)
                    return None
                return outcome.collect(followed, self.namespace, self.restarts, interrupts, into)
            finally:
                if on_end is not None:
                    on_end(followed.view)
        finally:
            release(self.pool_of(run), run)

    def open_view(self, run: ClientRun, state: RunState, ui: str) -> None:
        """Show a run that this process attached to, without waiting for its end."""
        followed = self.followed(run, ui, error_follows=False)
        self._open(followed, state, live=self.live_views.is_watched and ui != "text")

    def widget_of(self, run: ClientRun, state: RunState) -> Any:
        """Return an ipywidget that shows a run that this process attached to, and keep it up to date."""
        # imported here: it takes 50 ms, and only front ends without a Jupyter kernel need it
        from sgpu_magic.views.live.widgets import WidgetAsValue

        view = _view(run, self.current_settings())
        value = WidgetAsValue(view, self._buttons(run))
        self._open(Subscription(run, view, value, self.pool_of(run)), state, live=True)
        return value.widget

    def _open(self, followed: Subscription, state: RunState, *, live: bool) -> None:
        """Show a run without waiting for its end.

        Args:
            followed: The run, which this process attached to. It is closed here.
            state: The run's state when this process attached to it.
            live: Keep the view up to date while the run is active; otherwise show its events so far once.
        """
        if live and not state.is_final:
            self._windows = {run_id: window for run_id, window in self._windows.items() if window.is_alive}
            # stop the run's view below an earlier cell, so that there is one thread per run
            if (earlier := self._windows.pop(followed.run.run_id, None)) is not None:
                earlier.stop()
            work = Background("sgpu-view", lambda stopped: _follow(followed, state, stopped))
            self._windows[followed.run.run_id] = work
        else:
            try:
                outcome.replay(followed, state)
            finally:
                followed.run.close()

    def unseen(self, run: ClientRun) -> Subscription:
        """Return a run with a view that is not shown."""
        return Subscription(
            run, _view(run, self.settings), SilentPublisher(), self.pool_of(run), on_end=self._on_end(run)
        )

    def _on_end(self, run: ClientRun) -> Callable[[RunView, RunEnded], None] | None:
        return self.notifier.run_ended if run.owned else None

    def _buttons(self, run: ClientRun) -> Buttons:
        """Return the actions of a view's buttons, which are called in other threads than the cell's."""

        def cancel() -> str:
            pressed, text = stop_texts(run.spec)
            run.cancel(pressed)
            return text

        def end_session(run_id: str) -> None:
            self.pool_of(run).cancel(run_id, CancelReason.END_BUTTON)

        def stacks() -> list[str]:
            answer = self.pool_of(run).stacks(run.run_id)
            return stacks_text(answer.run_id, answer.stacks, answer.cell).splitlines()

        bring = run.mirror.follow if run.mirror is not None else None
        return Buttons(run.directory, cancel, end_session, stacks, bring, run.send_comms, run.owned)


def _view(run: ClientRun, settings: Settings, *, error_follows: bool = False) -> RunView:
    view = RunView(run.spec, settings.output_limit, pool=run.pool, error_follows=error_follows)
    view.directory = "" if run.mirror is not None else str(run.directory)
    return view


def _follow(followed: Subscription, state: RunState, stopped: threading.Event) -> None:
    try:
        outcome.show(followed, state, stopped)
    finally:
        followed.run.close()


_lock = threading.Lock()
_current: KernelContext | None = None


def kernel_context() -> KernelContext:
    """Return this process's context, created on first use. Thread-safe.

    It is closed at exit, so that no thread waits for a pool's messages while the interpreter shuts down.
    """
    global _current
    with _lock:
        if _current is None:
            _current = KernelContext(_running_shell())
        return _current


def close_kernel_context() -> None:
    """Close this process's context; the next call of `kernel_context` creates a new one."""
    global _current
    with _lock:
        closing, _current = _current, None
    if closing is not None:
        closing.close()


@atexit.register
def _close_at_exit() -> None:
    context = _current
    if context is not None and context.shell is None:
        for followed in context.follower.following:
            spec = followed.run.spec
            if followed.run.owned and not followed.view.is_final and spec.run_id not in context.detached:
                sys.stderr.write(
                    f"run {short(spec.run_id)} ({spec.name}) is cancelled: the program ended before it did. result() "
                    "waits for it, detach() lets it continue.\n"
                )
    close_kernel_context()


def _running_shell() -> Any:
    """Return the running IPython shell, None in a plain program. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
