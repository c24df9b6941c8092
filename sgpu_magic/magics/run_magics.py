"""The magics that run cells, inspect runs and replay them."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Generator
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from msgspec.structs import replace

from sgpu_magic.client.find_run import check_prefix
from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run_files import recorded_directory
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.magics.warm_pool import WarmPool
from sgpu_magic.options import argparse_form
from sgpu_magic.options.argparse_form import NO_SESSION, RAY, OptionParser, add_option, add_replay, read_replay, takes
from sgpu_magic.options.option_records import RunOptions, check_cell
from sgpu_magic.runs.follow import outcome
from sgpu_magic.runs.handle import Run
from sgpu_magic.runs.kernel_context import close_kernel_context, kernel_context
from sgpu_magic.runs.pools_status import StatusBoard
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.cell_source import check_outputs, has_code, pack_cell, read_cell
from sgpu_magic.runs.submit.spec import describe
from sgpu_magic.runs.submit.submit import submit
from sgpu_magic.runs.submit.target import with_target
from sgpu_magic.views import help as help_pages
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.stacks import stacks_html, stacks_text
from sgpu_magic.wire.base import RunState

Launched = RunResult | Run[Any] | None
"""A cell's value: its result, its handle with `--nowait`, None if it was detached."""

_NOT_SUBMITTED = "before the run was submitted; nothing was started."


def _add_run(made: OptionParser) -> None:
    made.add_argument("run", nargs="?", default="", metavar="RUN", help="ID of the run, or its first digits")


def _add_attached(made: OptionParser) -> None:
    _add_run(made)
    add_option(made, "ui")


def _add_replayed(made: OptionParser) -> None:
    _add_run(made)
    add_replay(made)
    add_option(made, "ui")


def _add_shown(made: OptionParser) -> None:
    what = "the first digits of its id, or a session's name"
    made.add_argument("run", nargs="?", default="", metavar="RUN", help=what)
    made.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all)")
    add_option(made, "ui")


@contextlib.contextmanager
def interrupted(text: str) -> Generator[None]:
    """Raise `RunCancelled` with this sentence when the user interrupts."""
    try:
        yield
    except KeyboardInterrupt:
        raise RunCancelled(f"interrupted {text}") from None


def _id_of(magic: str, run: str) -> str:
    """Return the normalized first digits of a run's id; "" if the line names no run.

    Raises:
        UsageError: They can't be the beginning of an id.
    """
    return check_prefix(run, ", as %sgpu_status lists them", f"{magic}: ") if run else ""


@magics_class
class DistributedMagics(Magics):
    """`%%distributed`, `%%rank`, `%%ray_launch`, and the magics for existing runs."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        super().__init__(shell=shell)
        self._shell = shell
        self._auto = auto
        self.context = kernel_context()
        self.pool = self.context.pool
        self.warmth = WarmPool(self.pool)
        self._board = StatusBoard(self.context.pools, self.context.settings.status_idle_s)

    def close(self) -> None:
        """End the sessions and close the links to pools; the local pool keeps running for other clients."""
        self._board.close()
        registry.close_all()
        close_kernel_context()

    @cell_magic
    def distributed(self, line: str, cell_body: str) -> Launched:
        """Run this cell on N ranks of a pool. `%%distributed -h` shows the options."""
        return self._run("%%distributed", line, cell_body)

    @cell_magic
    def rank(self, line: str, cell_body: str) -> Launched:
        """Run this cell on some ranks of the connected session: `%%rank 0`. `%%rank -h` shows the options."""
        return self._run("%%rank", line, cell_body)

    @cell_magic
    def ray_launch(self, line: str, cell_body: str) -> Launched:
        """Run this cell as the driver of a new Ray cluster. `%%ray_launch -h` shows the options."""
        return self._run(RAY, line, cell_body)

    @cell_magic
    def sgpu_auto_cell(self, line: str, cell_body: str) -> RunResult:
        """Run a plain cell in the session; `%sgpu_auto` rewrites plain cells to this magic."""
        session = registry.get_session()
        self.context.notices.show("")
        return session.run_cell("", cell_body, RunOptions(auto=True))

    def _run(self, magic: str, line: str, cell_body: str) -> Launched:
        options = argparse_form.parse(line, magic)
        if options is None:
            print(argparse_form.parser(magic).format_help())  # noqa: T201  help is output
            return None
        if not has_code(cell_body):
            print("the cell is empty: no rank was started.")  # noqa: T201
            return None
        magic_line = f"{magic} {line}".strip()
        session = registry.current(options.session) if options.session != NO_SESSION else None
        if options.pool or session is None or options.fresh:
            self.context.wanted_pool(options.pool)
        check_cell(session, options, magic)
        self.context.notices.show("")
        if options.here:
            self._run_here(cell_body)
        if session is None or options.fresh:
            return self._run_fresh(magic_line, cell_body, options, session)
        options = replace(options, only=session.only(options.selected or None))
        if options.nowait:
            return session.begin_cell(magic_line, cell_body, options)
        return session.run_cell(magic_line, cell_body, options)

    def _run_here(self, cell_body: str) -> None:
        """Run a cell in the notebook; nothing goes to the ranks if that fails."""
        # lines count as in the whole cell; a magic has to be the first one
        code = cell_body if cell_body.startswith("%%") else f"\n{cell_body}"
        was_on, self._auto.is_on = self._auto.is_on, False
        try:
            done = self._shell.run_cell(code, store_history=False)
        finally:
            self._auto.is_on = was_on
        error: Any = done.error_before_exec or done.error_in_exec
        if error is not None:
            # IPython has shown it
            with contextlib.suppress(AttributeError):
                error._render_traceback_ = list
            raise error

    def _run_fresh(self, magic_line: str, cell_body: str, options: RunOptions, session: Session | None) -> Launched:
        """Run a cell on new ranks, on a new lease or on a session's."""
        if session is not None:
            found = session.checked().fresh_target(options.ranks)
        else:
            options, found = with_target(self.context, options)
        with interrupted(_NOT_SUBMITTED):
            cell = read_cell(self.context, magic_line, cell_body, options)
            check_outputs(cell, options.outputs)
            submission = describe(self.context, pack_cell(self.context, cell, options), options, found, session)
        run = submit(found.pool, submission, waits=not options.nowait)

        def on_end(_: RunView) -> None:
            if session is None and found.pool is self.pool:
                self.warmth.ran(found.placement.ranks)

        if options.nowait:
            return Run(self.context, run, RunState.QUEUED, on_end, options.ui)
        return self.context.collect(run, options.ui, on_end=on_end)

    @line_magic
    @takes(
        "Launch a run again from its directory, with the same code, variables and packages; differences on this "
        "machine are reported. Names of --out are set here, as the cell did.",
        _add_replayed,
        "This notebook's packages are used if they equal the run's, else the run's own Python if it is unchanged, else "
        "the recorded packages are installed. Values of --env are never recorded: set them here.",
    )
    def sgpu_replay(self, values: Namespace) -> RunResult | None:
        """Replay a run from its directory: `%sgpu_replay RUN`; `-h` shows the options."""
        if not values.run:
            raise UsageError(
                "%sgpu_replay: which run? Give the first digits of its id, as %sgpu_status lists them. `%sgpu_replay "
                "-h` shows the options."
            )
        # imported here: only a replay needs them
        from sgpu_magic.runs.replay.recorded import prepare_replay, read_recorded

        options = read_replay(values, values.ui)
        context = self.context
        context.notices.show("")
        with interrupted(_NOT_SUBMITTED):
            with recorded_directory(context.current_settings(), values.run) as directory:
                recorded = read_recorded(directory)
            submission = prepare_replay(context, recorded, options)
        run = submit(context.pool_of(submission), submission, waits=True)
        return context.collect(run, options.ui)

    @line_magic
    @takes("Show a run from its beginning as if its cell had run here, and bring its results back.", _add_attached)
    def sgpu_attach(self, values: Namespace) -> RunResult | None:
        """Show a run from its beginning and bring its results back: `%sgpu_attach [RUN] [--ui auto|text|none]`."""
        with interrupted("before the pool answered; its runs continue."):
            run, state = self.context.attach(_id_of("%sgpu_attach", values.run))
        with contextlib.closing(run):
            followed = self.context.followed(run, values.ui)
            return outcome.watch(followed, state, self._shell.user_ns)

    @line_magic
    @takes("Let a run continue without its notebook; without RUN, all runs of this notebook.", _add_run)
    def sgpu_detach(self, values: Namespace) -> None:
        """Detach a run so that it continues without its notebook: `%sgpu_detach [RUN]`; without RUN, all its runs."""
        context, run = self.context, _id_of("%sgpu_detach", values.run)
        pools = [context.pool_with(run, only_active=True)] if run else context.pools.connected() or [context.pool]
        print(" ".join(pool.detach(run, start=True) for pool in pools))  # noqa: T201

    @line_magic
    @takes("Show where every rank of a run is.", _add_run)
    def sgpu_stacks(self, values: Namespace) -> None:
        """Show the current stack of every rank of a run: `%sgpu_stacks [RUN]`."""
        run = _id_of("%sgpu_stacks", values.run)
        answer = self.context.pool_with(run, only_active=True).stacks(run, start=True)
        described = (answer.run_id, answer.stacks, answer.cell)
        self.context.publish(stacks_text(*described), {"text/html": stacks_html(*described)})

    @line_magic
    @takes("Show the devices, the queue and the runs of all pools; or the view of one run or session.", _add_shown)
    def sgpu_status(self, values: Namespace) -> None:
        """Show devices, queue and runs, or one run's view: `%sgpu_status [RUN] [--pool NAME] [--ui auto|text|none]`."""
        session = registry.find(values.run)
        run_id = session.run_id if session is not None else _id_of("%sgpu_status", values.run)
        if run_id:
            run, state = self.context.attach(run_id)
            self.context.open_view(run, state, values.ui)
        elif self.context.is_notebook:
            self._board.show(self.context.live_views.is_watched, values.pool)
        else:
            print(self._board.text(values.pool))  # noqa: T201

    @line_magic
    def sgpu_help(self, line: str = "") -> None:
        """Show the help page of a topic, such as an error: `%sgpu_help [TOPIC]`; without TOPIC, list all topics."""
        markdown = help_pages.page(line.strip())
        self.context.publish(help_pages.plain(markdown), {"text/markdown": markdown})
