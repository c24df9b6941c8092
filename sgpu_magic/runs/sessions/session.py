"""`Session`: runs cells and calls on a session's ranks, and sets and reads names there."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.formatting import format_ranks, names_text
from sgpu_magic.options.option_records import EnvironmentOptions, RunOptions
from sgpu_magic.options.rank_lists import Ranks, ranks_from
from sgpu_magic.options.values import Duration, check_name, outputs_from, timeout_s
from sgpu_magic.packages.distributions import InstalledPackages
from sgpu_magic.payload.call import FunctionCall
from sgpu_magic.runs.follow.outcome import Interrupts
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.runs.handle import Run
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.sessions import cell_runner
from sgpu_magic.runs.sessions.cell_runner import names_on, push
from sgpu_magic.runs.sessions.lifecycle import SessionLifecycle
from sgpu_magic.runs.sessions.namespace_sync import NamespaceTracker
from sgpu_magic.runs.sessions.some_ranks import RankCollection
from sgpu_magic.wire.run import OutputName

# how many names a sentence lists
_MOST_NAMES = 12


class Session(SessionLifecycle, RankCollection):
    """Ranks that stay alive between cells. All methods are thread-safe.

    Use it in `with` or `async with`; `await` it to wait until it is connected.

    Args:
        context: The kernel's context.
        followed: The session's own run.
        variables: Environment variables to set on the ranks, in addition to this process's environment.
        environment: The requested packages and tracking.
        packages: The packages that were installed in this process when the session was connected.

    Attributes:
        shipping: Which names of the notebook the ranks have.
        interrupts: Cells that were interrupted and have not stopped.
        end_reported: The user knows that the session has ended: it was closed, or a cell was refused because of that.
        lock: Held while something is prepared and submitted, because what is sent depends on what was sent before.
    """

    def __init__(
        self,
        context: KernelContext,
        followed: Subscription,
        variables: Mapping[str, str],
        environment: EnvironmentOptions,
        packages: InstalledPackages,
    ) -> None:
        self.environment = environment
        self.packages = packages
        self.shipping = NamespaceTracker()
        self.interrupts = Interrupts()
        self.lock = threading.RLock()
        super().__init__(context, followed, variables)
        self.whole, self.numbers = self, tuple(range(self.ranks))

    # ------------------------------------------------------------ running code and moving names

    def run(
        self,
        code: str,
        *,
        ranks: Ranks | None = None,
        out: str | Iterable[str] = (),
        name: str = "",
        reload: bool = False,
        timeout: Duration | None = None,
        ui: str = "auto",
    ) -> RunResult:
        """Run code on the session's ranks as a cell and return the result.

        Args:
            code: Python code, optionally with IPython magics.
            ranks: The ranks that run it: `0`, `[0, 2]`, `"0,2-3"`. Default: all.
            out: Names to bring back into the notebook or program: `"history"`, `["history", "loss:all"]`.
            name: The run's name.
            reload: Reload edited local modules on the ranks first.
            timeout: Maximum running time: seconds, a text such as `"5m"` or a `timedelta`.
            ui: How the run is shown: `"auto"`, `"widget"`, `"text"` or `"none"`.

        Raises:
            RunCancelled: The run was cancelled.
            SessionError: The session has ended or can't run the code.
            Exception: The exception of the rank that failed first.
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
        """Run a cell on the session's ranks, as `run` does."""
        return cell_runner.run_in(self, lambda: cell_runner.prepare_cell(self, magic_line, body, options), options.ui)

    def begin_cell(self, magic_line: str, body: str, options: RunOptions) -> Run[Any]:
        """Run a cell on the session's ranks and return its handle immediately. Cells run one after the other."""
        return cell_runner.begin_in(self, lambda: cell_runner.prepare_cell(self, magic_line, body, options), options.ui)

    def call(self, function: Callable[..., Any], /, *args: Any, ranks: Ranks | None = None, **kwargs: Any) -> list[Any]:
        """Call a function on the session's ranks and return the list of results, by rank.

        Each rank fills in the parameters `rank`, `local_rank`, `world_size` and `device` if you omit them and they
        have no default.

        Args:
            function: The function to call.
            args: Its positional arguments.
            ranks: The ranks that call it, as for `run`.
            kwargs: Its keyword arguments.

        Raises:
            Exception: As for `run`, and TypeError if the arguments do not match the function's signature.
        """
        call, options = FunctionCall(function, args, kwargs), RunOptions(only=self.only(ranks))
        return cell_runner.run_in(self, lambda: cell_runner.prepare_call(self, call, options)).values

    def call_async(
        self, function: Callable[..., Any], /, *args: Any, ranks: Ranks | None = None, **kwargs: Any
    ) -> Run[Any]:
        """Call a function as `call` does and return the run's handle immediately; `.result()` waits for the results.

        Calls and cells of one session run in the order in which they were started.

        Args:
            function: The function to call.
            args: Its positional arguments.
            ranks: The ranks that call it, as for `run`.
            kwargs: Its keyword arguments.

        Raises:
            TypeError: The arguments do not match the function's signature.
            SerializationError: The function or an argument can't be pickled.
        """
        call, options = FunctionCall(function, args, kwargs), RunOptions(only=self.only(ranks))
        return cell_runner.begin_in(self, lambda: cell_runner.prepare_call(self, call, options), "none")

    def push(self, *names: str | Mapping[str, Any], ranks: Ranks | None = None, **values: Any) -> None:
        """Set names on the session's ranks, overwriting existing values.

        Args:
            names: Names of the notebook or program to send with their values, or dictionaries of names and values.
            ranks: The ranks to set them on, as for `run`.
            values: Further names with their values.

        Raises:
            UsageError: The notebook or program has no such name.
            SerializationError: A value can't be pickled.
        """
        given = {name: value for each in names if isinstance(each, Mapping) for name, value in each.items()} | values
        for name in given:
            check_name("the name to set", name)
        own = tuple(name for name in names if isinstance(name, str))
        if not own and not given:
            raise UsageError('push() takes names or values to set: push("cfg"), push(lr=0.1).')
        only = self.only(ranks)
        cell_runner.run_in(self, lambda: cell_runner.prepare_push(self, own, given, only), "auto" if own else "none")
        self.shipping.set_on_ranks(given, self.context.namespace, self.ranks_of(only), pushed=True)

    def keep(self, *names: str) -> None:
        """Let the ranks keep their values of these names, whatever the notebook does with its own.

        A cell compares what it reads with what the ranks have, which takes time for a long list or a large DataFrame.
        Names that are kept are neither compared nor sent; a rank that has no value yet, such as a restarted one,
        gets the notebook's with the next cell that reads it. `push` still sets a kept name.

        Args:
            names: The names.

        Raises:
            UsageError: None is given, or one is no variable's name.
        """
        if not names:
            raise UsageError('keep() takes the names that the ranks keep: keep("data").')
        for name in names:
            check_name("the name to keep", name)
        self.shipping.keep(names)

    def unkeep(self, *names: str) -> None:
        """Undo `keep`: the next cell that reads such a name takes the notebook's value along.

        Args:
            names: The names. Default: all that are kept.
        """
        self.shipping.unkeep(names)

    def pull(self, *names: str, ranks: Ranks | None = None) -> Any:
        """Return the value of a name on the lowest rank, or with `"x:all"` the list of all ranks' values.

        Args:
            names: The names. For several names, a tuple of their values is returned.
            ranks: The ranks to read from, as for `run`.

        Raises:
            UsageError: A rank has no such name.
            SerializationError: A value can't be pickled.
        """
        if not (outputs := outputs_from(names)):
            raise UsageError('pull() takes names to bring back: pull("history"), pull("loss:all").')
        found: dict[str, Any] = {}
        self.pull_into(found, outputs, self.only(ranks), "none")
        values = tuple(found[output.name] for output in outputs)
        return values[0] if len(values) == 1 else values

    def pull_into(
        self, into: dict[str, Any] | None, outputs: tuple[OutputName, ...], only: tuple[int, ...], ui: str
    ) -> None:
        """Bring names back into `into`, or into the notebook if it is None."""
        cell_runner.run_in(self, lambda: cell_runner.prepare_pull(self, outputs, only), ui, into)

    def restart(self, *ranks: int) -> str:
        """Replace ranks with new processes and send the notebook's values to them again.

        Args:
            ranks: The ranks to restart. Default: all.

        Returns:
            A sentence that says what was lost.

        Raises:
            SessionError: A cell is running on the ranks, or they could not be started.
        """
        self.checked()
        return _restarted(self, self.only(ranks or None))

    def _on_event(self) -> None:
        super()._on_event()
        if self.has_ended:
            self.shipping.ended()

    # ------------------------------------------------------------ for the preparation of cells

    def only(self, ranks: Ranks | None) -> tuple[int, ...]:
        """Return the selected ranks in ascending order; empty for all.

        Raises:
            UsageError: The session has no such rank.
        """
        return ranks_from(ranks, self.ranks, f"session {self.name}")

    def set_on_one(self, rank: int, name: str, value: Any) -> None:
        """Set a name on one rank to a value of its own, which a restarted rank does not get again."""
        cell_runner.run_in(self, lambda: cell_runner.prepare_push(self, (), {name: value}, (rank,)), "none")
        self.shipping.set_on_ranks((name,), self.context.namespace, (rank,))

    def ranks_of(self, only: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of the selected ranks; an empty `only` selects all."""
        return only or self.numbers

    def environment_with(self, environment: EnvironmentOptions) -> EnvironmentOptions:
        """Return the options for a cell on the session's devices.

        The packages are the session's, and so is the tracking if the cell does not set it. The uploads are the cell's
        own: the ranks already have those of the session.
        """
        track = self.environment.track if environment.track is None else environment.track
        return replace(self.environment, track=track, uploads=environment.uploads)


def _restarted(session: Session, only: tuple[int, ...]) -> str:
    """Replace ranks, send the notebook's values to them again, and return a sentence about their names.

    Args:
        session: The session.
        only: The ranks; empty means all.

    Raises:
        SessionError: A cell is running on the ranks, or they could not be started.
    """
    context, ranks = session.context, session.ranks_of(only)
    lost = _names_lost(session, ranks)
    pushed = _pushed_values(session, ranks)
    session.pool.restart_ranks(session.run_id, only)
    again: set[str] = set()
    for names, some in session.shipping.restarted(ranks).items():
        if there := [name for name in names if name in context.namespace]:
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
    if not (lost_names := sorted(lost - again - set(pushed))):
        return f"{what}; {sent}; no name that a cell had set was lost."
    again_on = f" with --ranks {','.join(map(str, only))}" if only else ""
    return f"{what}; {sent}; lost, as cells had set it there: {listed(lost_names)}. Run those cells again{again_on}."


def _pushed_values(session: Session, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the values pushed to these ranks, read from a rank that stays. Values that can't be read are lost."""
    found: dict[str, Any] = {}
    for rank, names in session.shipping.pushed_names({*ranks, *session.dead}).items():
        for name in names:
            with contextlib.suppress(UsageError, SerializationError):
                session.pull_into(found, (OutputName(name),), (rank,), "none")
    return found


def _names_lost(session: Session, ranks: tuple[int, ...]) -> frozenset[str]:
    """Return the names that cells set on these ranks, as reported by a live rank, otherwise as known here."""
    own = session.shipping.own_names(ranks)
    living = [rank for rank in range(session.ranks) if rank not in session.dead]
    for rank in sorted(living, key=lambda rank: rank in ranks):
        if (there := names_on(session, rank)) is not None:
            # only names that no rank is known to have: for the others, the records per rank decide
            return own | session.shipping.unknown(there)
    return own
