"""`Session`: ranks that stay alive between cells.

It waits for devices, connects and ends; it runs cells and calls on its ranks, and sets and reads names there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from html import escape
from typing import Any, Self

from msgspec.structs import replace

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import SessionError, UsageError
from sgpu_magic.formatting import count_of, format_ranks
from sgpu_magic.options.option_records import EnvironmentOptions, RunOptions
from sgpu_magic.options.rank_lists import Ranks, ranks_from
from sgpu_magic.options.values import Duration, check_name, duration_s, outputs_from, timeout_s
from sgpu_magic.packages.distributions import InstalledPackages
from sgpu_magic.payload.call import FunctionCall
from sgpu_magic.runs.follow import outcome
from sgpu_magic.runs.follow.outcome import Interrupts
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.runs.handle import Run
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.notebook import cell_number
from sgpu_magic.runs.notices import Background
from sgpu_magic.runs.sessions import cell_runner
from sgpu_magic.runs.sessions.namespace_sync import NamespaceTracker
from sgpu_magic.runs.sessions.rank_collection import RankCollection
from sgpu_magic.runs.sessions.rank_restart import restart_ranks
from sgpu_magic.runs.submit.target import ResolvedTarget
from sgpu_magic.views.run_notes import SessionState, finishing_text
from sgpu_magic.wire.base import CancelReason, RunState, short
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import Placed
from sgpu_magic.wire.run import OutputName

_CLOSE_PATIENCE_S = 10.0
# a dead pool service is replaced within about 1 s
_ADOPTION_PATIENCE_S = 20.0


class Session(RankCollection):
    """Ranks that stay alive between cells. All methods are thread-safe.

    Use it in `with` or `async with`; `await` it to wait until it is connected.

    Args:
        context: The kernel's context.
        followed: The session's own run.
        variables: Environment variables to set on the ranks, in addition to this process's environment.
        environment: The requested packages and tracking.
        packages: The packages that were installed in this process when the session was connected.

    Attributes:
        spec: The specification that was submitted.
        name: The session's name.
        run_id: The id of the session's own run, for `sgpu logs` and `%sgpu_status`.
        ranks: Number of ranks.
        variables: Environment variables set on the ranks, in addition to this process's environment.
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
        spec = followed.run.spec
        self.context = context
        self.spec = spec
        self.name = spec.name
        self.run_id = spec.run_id
        self.placement: Placement = spec.placement
        self.ranks = spec.placement.ranks
        self.whole, self.numbers = self, tuple(range(self.ranks))
        self.variables = dict(variables)
        self.environment = environment
        self.packages = packages
        self.shipping = NamespaceTracker()
        self.interrupts = Interrupts()
        self.lock = threading.RLock()
        self.shown_in: object = None
        self.end_reported = False
        self._view = followed.view
        self._run = followed.run
        # why the session is to end, and the link over which that was asked
        self._asked_to_end: tuple[str, object] | None = None
        self._moved = threading.Condition()
        # for coroutines: resolved when the session is connected or has ended
        self._decided = Future[None]()
        followed = replace(followed, on_event=self._on_event)
        self._follower = Background("sgpu-session", lambda stopped: outcome.show(followed, RunState.QUEUED, stopped))

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
        """Undo `keep`: the notebook's value is sent with the next cell that reads such a name.

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
        return restart_ranks(self, self.only(ranks or None))

    # ------------------------------------------------------------ state

    @property
    def pool(self) -> Pool:
        """The pool that the session runs in."""
        return self.context.pool_of(self._run)

    def fresh_target(self, ranks: int | None) -> ResolvedTarget:
        """Return the target for `ranks` new processes on the session's devices; None means one per rank."""
        return ResolvedTarget(self.pool, replace(self.placement, ranks=ranks or self.ranks))

    @property
    def device_type(self) -> str:
        """The type of the session's devices: the requested type while it waits, then the granted one."""
        lease = self._view.lease
        return lease.device_type if lease is not None else self.placement.device_type

    @property
    def placed(self) -> Placed | None:
        """The session's devices; None while its ranks are not ready."""
        view = self._view
        if view.lease is None or view.state is not RunState.RUNNING:
            return None
        return Placed(lease=view.lease, host=view.host, labels=view.labels, hourly=view.hourly, currency=view.currency)

    @property
    def state(self) -> str:
        """The session's state, in words."""
        view = self._view
        match view.state:
            case RunState.QUEUED:
                return f"waits for devices: {view.waiting_for}" if view.waiting_for else "waits for devices"
            case RunState.PREPARING | RunState.STARTING:
                return "starting"
            case RunState.RUNNING:
                dead = self.dead
                return f"connected, {format_ranks(dead)} dead" if dead else "connected"
            case RunState.CANCELLING:
                finishing = finishing_text(self._view.finishing)
                return f"ending: {finishing}" if finishing else "ending"
            case _:
                return f"ended: {self.ending}"

    @property
    def is_connected(self) -> bool:
        """Whether the session's ranks are ready."""
        return self._view.state is RunState.RUNNING

    @property
    def is_idle(self) -> bool:
        """Whether the session's ranks are ready and no cell is running on them."""
        return self.is_connected and not self._reported_state.running

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended."""
        return self._view.state.is_final or bool(self._view.left)

    @property
    def ending(self) -> str:
        """Who ended the session and why; `""` while it has not ended."""
        if (ended := self._view.ended) is None:
            return self._view.left
        if ended.failure is not None:
            return ended.failure.message.rstrip(".")
        return (ended.reason or "no reason was given").rstrip(".")

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that are dead and need a restart."""
        return self._reported_state.dead

    @property
    def running(self) -> tuple[str, ...]:
        """The names of the running cells, as last reported."""
        return self._reported_state.running

    @property
    def cells(self) -> int:
        """Number of cells that have run in the session so far, including running ones."""
        return self._reported_state.cells

    @property
    def run_state(self) -> RunState:
        """The state of the session's own run."""
        return self._view.state

    def wait_for_dead_ranks(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until a rank is known to be dead and return the dead ranks; empty after `timeout_s` seconds."""
        with self._moved:
            self._moved.wait_for(lambda: self.dead or self.has_ended, timeout_s)
        return self.dead

    def wait_for_restarted_ranks(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Wait until these ranks are known to be alive: the pool's answer to a restart may precede that."""
        with self._moved:
            self._moved.wait_for(lambda: self.has_ended or not set(self.dead).intersection(ranks), timeout_s)

    @property
    def _reported_state(self) -> SessionState:
        return self._view.session or SessionState()

    def __repr__(self) -> str:
        kind = self.device_type if self.device_type != "any" else "devices of any type"
        count = count_of(self.ranks, "rank")
        return f"<Session {self.name}: {count} on {kind}, {self.state}, run {short(self.run_id)}>"

    def _ipython_display_(self) -> None:
        """Show nothing if the session's view is already below the cell; otherwise show it like any value."""
        shown, self.shown_in = self.shown_in, None
        if shown is None or shown != cell_number(self.context.shell):
            # IPython then uses the other representations
            raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    # ------------------------------------------------------------ waiting

    def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until the session's ranks are ready.

        Args:
            timeout: Maximum time to wait: seconds, a text such as `"5m"` or a `timedelta`. Default: no limit.

        Raises:
            SessionError: The session has ended.
            TimeoutError: The session is not connected within `timeout`; it continues.
        """
        seconds = None if timeout is None else duration_s("timeout", timeout)
        with self._moved:
            if not self._moved.wait_for(self._is_decided, seconds):
                raise TimeoutError(
                    f"session {self.name} is not connected after {seconds:g} s: {self.state}. It keeps trying: wait "
                    "again, or close() it."
                )
        return self.checked()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._connected().__await__()

    async def _connected(self) -> Self:
        if not self._is_decided():
            await asyncio.shield(asyncio.wrap_future(self._decided))
        return self.checked()

    def checked(self) -> Self:
        """Return the session itself if it can run a cell, now or once its ranks are ready.

        Raises:
            SessionError: The session has ended or is ending.
        """
        if self.has_ended or self._view.state is RunState.CANCELLING:
            why = f": {self.ending}" if self.ending else ""
            raise SessionError(
                f"session {self.name} has ended{why}. Its ranks' variables are lost. Start another with %sgpu_connect "
                "or sgpu_magic.connect(...)."
            )
        if self._run.link.lost.is_set():
            # its pool service died; the next one takes the session over
            with self._moved:
                self._moved.wait_for(lambda: self.has_ended or not self._run.link.lost.is_set(), _ADOPTION_PATIENCE_S)
        return self

    def _is_decided(self) -> bool:
        return self.is_connected or self.has_ended

    def _on_event(self) -> None:
        """Wake waiters after an event. Runs in the follower's thread."""
        with self._moved:
            self._moved.notify_all()
        if self._is_decided() and not self._decided.done():
            self._decided.set_result(None)
            if self.is_connected:
                self.pool.open_line(self.run_id)
        if self.has_ended:
            self.shipping.ended()
        elif self._asked_to_end is not None and self._asked_to_end[1] is not self._run.link:
            # the pool service that was asked has ended, maybe before it could act
            self.end(self._asked_to_end[0])

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        """End the session: cancel running cells, stop the ranks and free the devices.

        The ranks first finish what cells have started, such as threads (the setting `finish_timeout_s`). An interrupt
        ends the waiting, not the ranks' work.
        """
        self.end(CancelReason.DISCONNECT)
        while not self.wait_for_end(_CLOSE_PATIENCE_S) and self._view.finishing:
            pass
        self._release()

    def end(self, reason: str) -> None:
        """Request the session's end without waiting for it."""
        if not self.has_ended:
            self._asked_to_end = reason, self._run.link
            self._run.cancel(reason)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the session has ended; return False if it has not after `timeout_s` seconds."""
        with self._moved:
            return self._moved.wait_for(lambda: self.has_ended, timeout_s)

    def _release(self) -> None:
        self.end_reported = True
        self._follower.stop()
        if self.has_ended:
            self.pool.reuse_payload(self.run_id)
        self._run.close()

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            return await self._connected()
        except BaseException:
            self.end(CancelReason.DISCONNECT)
            raise

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

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

        The packages are the session's, and so is the tracking if the cell does not set it. The files are the cell's
        own: the ranks already have those of the session.
        """
        track = self.environment.track if environment.track is None else environment.track
        return replace(self.environment, track=track, uploads=environment.uploads, files=environment.files)
