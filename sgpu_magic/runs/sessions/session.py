"""The handle of a session: cells, calls and names, for its ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.options.asked import RunOptions, Wishes
from sgpu_magic.options.values import Duration, format_ranks, outputs_from, ranks_from, timeout_s
from sgpu_magic.packages.distributions import Snapshot
from sgpu_magic.runs.follow.outcome import Interrupts
from sgpu_magic.runs.follow.run_loop import Followed
from sgpu_magic.runs.sessions import run_in
from sgpu_magic.runs.sessions.lifetime import Lifetime
from sgpu_magic.runs.sessions.namespace_sync import Shipping
from sgpu_magic.runs.sessions.run_in import names_on, push
from sgpu_magic.runs.workplace import Workplace
from sgpu_magic.views.words import names_text
from sgpu_magic.wire.run import OutputName

# so many names are listed in a sentence
_MOST_NAMES = 12


class Session(Lifetime):
    """Ranks that stay alive between cells. Methods may be called by any thread.

    A context manager and, in async code, an asynchronous one; awaiting it waits until it is connected.

    Args:
        place: This process's runs.
        followed: The session's own run.
        variables: Set on its ranks beside this process's environment.
        wishes: What was asked for about its packages and its tracking.
        packages: What was installed here when it was connected.

    Attributes:
        shipping: What its ranks have of the notebook.
        interrupts: Its cells that were interrupted and have not stopped.
        ending_told: The user knows that it has ended: it was closed, or a cell was refused because of that.
        lock: Held while something is prepared and handed over: what goes along depends on what went before.
    """

    def __init__(
        self,
        place: Workplace,
        followed: Followed,
        variables: Mapping[str, str],
        wishes: Wishes,
        packages: Snapshot,
    ) -> None:
        self.wishes = wishes
        self.packages = packages
        self.shipping = Shipping()
        self.interrupts = Interrupts()
        self.lock = threading.RLock()
        super().__init__(place, followed, variables)

    # ------------------------------------------------------------ using it

    def run(
        self,
        code: str,
        *,
        ranks: Iterable[int] | int | str | None = None,
        out: str | Iterable[str] = (),
        name: str = "",
        reload: bool = False,
        timeout: Duration | None = None,
        ui: str = "auto",
    ) -> RunResult:
        """Run code on its ranks as a cell, and return the result.

        Args:
            code: Python, with IPython's magics if need be.
            ranks: Those that take part: `0`, `[0, 2]`, `"0,2-3"`; all when left out.
            out: Names to bring back into the notebook or program: `"history"`, `["history", "loss:all"]`.
            name: What to call it.
            reload: Load edited local modules anew on the ranks first.
            timeout: Longest running time: seconds, a text such as `"5m"` or a `timedelta`.
            ui: `"auto"`, `"widget"`, `"text"` or `"none"`.

        Raises:
            RunCancelled: It was cancelled.
            SessionError: The session can't take it.
            Exception: What the culprit rank raised.
        """
        options = RunOptions(
            name=name,
            only=self.only(ranks),
            outputs=outputs_from(out),
            reload=reload,
            timeout_s=timeout_s("timeout", timeout),
            ui=ui,
        )
        return self.run_cell("", code, options)

    def run_cell(self, magic_line: str, body: str, options: RunOptions) -> RunResult:
        """Run a cell on its ranks; as `run`."""
        self.checked()
        return run_in.run_in(self, lambda: run_in.prepare_cell(self, magic_line, body, options), options.ui)

    def call(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        ranks: Iterable[int] | int | str | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function on its ranks and return what it returned, by rank.

        Parameters named `rank`, `local_rank`, `world_size` and `device` that are left out are filled in by each rank.

        Args:
            function: The function.
            args: Its positional arguments.
            ranks: Those that call it, as for `run`.
            kwargs: Its keyword arguments.

        Raises:
            Exception: As `run`; TypeError when the arguments do not fit.
        """
        self.checked()
        options = RunOptions(only=self.only(ranks))
        return run_in.run_in(self, lambda: run_in.prepare_call(self, function, args, kwargs, options)).values

    def push(self, *names: str, ranks: Iterable[int] | int | str | None = None, **values: Any) -> None:
        """Set names on its ranks, whatever they have under them.

        Args:
            names: Names of the notebook or program.
            ranks: The ranks, as for `run`.
            values: Further names with their values.

        Raises:
            UsageError: There is no such name.
            SerializationError: A value can't travel.
        """
        if not names and not values:
            raise UsageError('push() takes names or values to set: push("cfg"), push(lr=0.1).')
        self.checked()
        only = self.only(ranks)
        run_in.run_in(self, lambda: run_in.prepare_push(self, names, values, only), "auto" if names else "none")
        self.shipping.set_on_ranks(values, self.place.namespace, self.ranks_of(only), pushed=True)

    def pull(self, *names: str, ranks: Iterable[int] | int | str | None = None) -> Any:
        """Return the value of a name on its lowest rank, or with `"x:all"` the list of all ranks' values.

        Args:
            names: The names; the values of several come as a tuple.
            ranks: The ranks, as for `run`.

        Raises:
            UsageError: A rank has no such name.
            SerializationError: A value can't travel.
        """
        outputs = outputs_from(names)
        if not outputs:
            raise UsageError('pull() takes names to bring back: pull("history"), pull("loss:all").')
        found: dict[str, Any] = {}
        self.pull_into(found, outputs, self.only(ranks), "none")
        values = tuple(found[output.name] for output in outputs)
        return values[0] if len(values) == 1 else values

    def pull_into(
        self, into: dict[str, Any] | None, outputs: tuple[OutputName, ...], only: tuple[int, ...], ui: str
    ) -> None:
        """Bring names back into `into`, or into the notebook where that is None."""
        self.checked()
        run_in.run_in(self, lambda: run_in.prepare_pull(self, outputs, only), ui, into)

    def restart(self, *ranks: int) -> str:
        """Replace ranks by new processes; what the notebook had shipped to them is pushed again.

        Args:
            ranks: Which; all when left out.

        Returns:
            What was lost, a sentence.

        Raises:
            SessionError: A cell runs in them, or they could not be started.
        """
        self.checked()
        return _restarted(self, self.only(ranks or None))

    # ------------------------------------------------------------ for those who prepare cells

    def only(self, ranks: Iterable[int] | int | str | None) -> tuple[int, ...]:
        """Return the ranks that take part, ascending; empty for all.

        Raises:
            UsageError: It has no such rank.
        """
        return ranks_from(ranks, self.ranks, f"session {self.name}")

    def ranks_of(self, only: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that take part, all of them by number."""
        return only or tuple(range(self.ranks))

    def wishes_with(self, wishes: Wishes) -> Wishes:
        """Return what holds for a cell on its devices: its own packages, tracked as it is if the cell does not say.

        What goes along is the cell's own: the ranks have what was uploaded for the session.
        """
        track = self.wishes.track if wishes.track is None else wishes.track
        return replace(self.wishes, track=track, uploads=wishes.uploads)


def _restarted(session: Session, only: tuple[int, ...]) -> str:
    """Replace ranks, push what the notebook had shipped to them, and return what became of their names.

    Args:
        session: The session.
        only: The ranks; empty means all.

    Raises:
        SessionError: A cell runs in them, or they could not be started.
    """
    place, ranks = session.place, session.ranks_of(only)
    lost = _names_lost(session, ranks)
    pushed = _pushed_values(session, ranks)
    session.pool.restart_ranks(session.run_id, only)
    again: set[str] = set()
    for names, some in session.shipping.restarted(ranks).items():
        there = [name for name in names if name in place.namespace]
        if there:
            push(session, there, some if len(some) < session.ranks else ())
            again.update(there)
    if pushed:
        session.push(**pushed, ranks=ranks)
    one = len(ranks) == 1
    what = f"{format_ranks(ranks)} of session {session.name} {'is a new process' if one else 'are new processes'}"
    listed = functools.partial(names_text, most=_MOST_NAMES)
    sent = f"sent again from the notebook: {listed(sorted(again))}" if again else "the notebook had shipped nothing"
    if pushed:
        sent += f"; from another rank: {listed(sorted(pushed))}"
    gone = sorted(lost - again - set(pushed))
    if not gone:
        return f"{what}; {sent}; no name that a cell had set was lost."
    again_on = f" with --ranks {','.join(map(str, only))}" if only else ""
    return f"{what}; {sent}; lost, as cells had set it there: {listed(gone)}. Run those cells again{again_on}."


def _pushed_values(session: Session, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return what was pushed to these ranks, as a rank has it that stays. What can't be had from there is lost."""
    found: dict[str, Any] = {}
    for rank, names in session.shipping.pushed_names({*ranks, *session.dead}).items():
        for name in names:
            with contextlib.suppress(UsageError, SerializationError):
                session.pull_into(found, (OutputName(name),), (rank,), "none")
    return found


def _names_lost(session: Session, ranks: tuple[int, ...]) -> frozenset[str]:
    """Return what cells have set on these ranks, as a rank says that still lives; else as far as it is known here."""
    own = session.shipping.own_names(ranks)
    living = [rank for rank in range(session.ranks) if rank not in session.dead]
    for rank in sorted(living, key=lambda rank: rank in ranks):
        there = names_on(session, rank)
        if there is not None:
            # what is known is known by rank
            return own | session.shipping.unknown(there)
    return own
