"""What all runs of one process share: its pool, how they are shown, what becomes of them when it is restarted."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Run
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.protocol.ids import short
from sgpu_magic.render.publisher import SilentPublisher
from sgpu_magic.render.run_names import stop_words
from sgpu_magic.render.stacks import stacks_text
from sgpu_magic.render.view import RunView
from sgpu_magic.runs import follow, packages
from sgpu_magic.runs.following import Follower
from sgpu_magic.runs.notices import NoticeBoard
from sgpu_magic.runs.restarts import watch_restarts
from sgpu_magic.runs.windows import RunWindows
from sgpu_magic.widget.live_views import Buttons, LiveViews


class Workplace:
    """One process's runs: a kernel's, a terminal's or a script's.

    Args:
        shell: The IPython shell, None in a plain Python program.

    Attributes:
        settings: As they were when it was made; where the pool lives stays.
        pool: The local pool; it is started and connected to when first needed.
        is_notebook: A front end that draws HTML is there: any Jupyter kernel, no terminal.
        windows: Views of runs that no cell waits for.
        follower: Runs that a program follows while it does something else.
        detached: Runs that this process has submitted and that go on without it.
        restarts: Tells a restart of the kernel; None where there is no kernel.
    """

    def __init__(self, shell: Any = None) -> None:
        kernel = getattr(shell, "kernel", None)
        self.shell = shell
        self.settings = load_settings()
        self.is_notebook = kernel is not None
        self.notices = NoticeBoard(self.is_notebook)
        self.pool = Pool(self.settings, self.notices.notice)
        self.live_views = LiveViews(kernel)
        self.windows = RunWindows()
        self.detached: set[str] = set()
        self.follower = Follower()
        self.restarts = watch_restarts(kernel, self.pool, detaches=self.settings.detach_on_restart)

    @property
    def namespace(self) -> dict[str, Any]:
        """The notebook's variables; `__main__`'s in a plain program."""
        return self.shell.user_ns if self.shell is not None else sys.modules["__main__"].__dict__

    def close(self) -> None:
        """Close the link to the pool; the pool goes on for others."""
        if self.restarts is not None:
            self.restarts.remove()
        self.windows.close()
        self.follower.close()
        self.live_views.close()
        packages.close(self.pool)
        self.pool.close()

    def current_settings(self) -> Settings:
        """Settings that `%env` may have changed since; where the pool lives stays."""
        return load_settings()

    def check_pool(self, name: str) -> None:
        """Raise UsageError when there is no pool of that name."""
        if name != self.pool.name:
            raise UsageError(
                f"there is no pool named {name!r}. You have: {self.pool.name}. Leave --pool out to use it."
            )

    def followed(self, run: Run, ui: str = "auto", *, error_follows: bool = True) -> follow.Followed:
        """Return a run with its view, and where that is shown.

        Args:
            run: The run.
            ui: `auto`, `widget`, `text` or `none`.
            error_follows: The caller raises what the run failed with.
        """
        view = RunView(run.spec, self.current_settings().output_limit, pool=self.pool.name, error_follows=error_follows)
        view.directory = str(run.directory)
        publisher = self.live_views.publisher_for(ui, view, sys.stdout, self._buttons(run))
        return follow.Followed(run, view, publisher, self.pool)

    def unseen(self, run: Run) -> follow.Followed:
        """Return a run with its view, shown nowhere."""
        view = RunView(run.spec, self.settings.output_limit, pool=self.pool.name)
        view.directory = str(run.directory)
        return follow.Followed(run, view, SilentPublisher(), self.pool)

    def default_ranks(self, device_type: str | None) -> int:
        """Ranks without `--gpus`: all devices of a machine's one type, else two on CPU.

        Raises:
            UsageError: The pool has several types.
        """
        if device_type == "cpu":
            return _CPU_RANKS
        status = self.pool.status(recent=0)
        types: dict[str, int] = {}
        for device in status.inventory.devices if status is not None else ():
            types[device.type] = types.get(device.type, 0) + 1
        if device_type not in (None, "any"):
            return types.get(str(device_type), 0) or _CPU_RANKS
        if len(types) > 1:
            listed = ", ".join(f"{count} {name}" for name, count in types.items())
            raise UsageError(
                f"this pool has several types ({listed}): say how many of which with --gpus N --type TYPE."
            )
        return sum(types.values()) or _CPU_RANKS

    def _buttons(self, run: Run) -> Buttons:
        """What the buttons of a run's view do; they are pressed in other threads than the cell's."""

        def cancel() -> str:
            pressed, said = stop_words(run.spec)
            run.cancel(pressed)
            return said

        def stacks() -> list[str]:
            answer = self.pool.stacks(run.run_id)
            return stacks_text(answer.run_id, answer.stacks, answer.cell).splitlines()

        return Buttons(run.directory, cancel, stacks)


_CPU_RANKS = 2
_lock = threading.Lock()
_current: Workplace | None = None
_closes_at_exit = False


def workplace() -> Workplace:
    """This process's workplace, made when first asked for. May be called by any thread.

    It is closed when the process ends: threads that wait for the pool's messages must not meet a dying interpreter.
    """
    global _current, _closes_at_exit
    with _lock:
        if _current is None:
            _current = Workplace(_running_shell())
            if not _closes_at_exit:
                _closes_at_exit = True
                atexit.register(_close_at_exit)
        return _current


def close_workplace() -> None:
    """Close this process's workplace; the next one that is asked for is new."""
    global _current
    with _lock:
        closing, _current = _current, None
    if closing is not None:
        closing.close()


def _close_at_exit() -> None:
    place = _current
    if place is not None and place.shell is None:
        for followed in place.follower.following:
            spec = followed.run.spec
            if followed.run.owned and not followed.view.is_final and spec.run_id not in place.detached:
                sys.stderr.write(
                    f"run {short(spec.run_id)} ({spec.name}) is cancelled: the program has ended before it. result() "
                    "waits for it, detach() lets it go on.\n"
                )
    close_workplace()


def _running_shell() -> Any:
    """The IPython shell that this process is, None for a plain program. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
