"""The magics that run cells, and those that look at runs."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import RunCancelled
from sgpu_magic.magics import arguments, cell, line_arguments
from sgpu_magic.magics.auto import AutoMode
from sgpu_magic.magics.choosing import session_for, with_notebooks_choice
from sgpu_magic.magics.status import StatusBoard
from sgpu_magic.magics.warmth import Warmth
from sgpu_magic.runs.follow import run_loop
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.cells import SessionCell
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.submit import let_go, submit
from sgpu_magic.runs.workplace import close_workplace, workplace
from sgpu_magic.views import help as help_pages
from sgpu_magic.views.stacks import stacks_html, stacks_text


@magics_class
class DistributedMagics(Magics):
    """`%%distributed`, `%sgpu_status`, and what one does with a run that goes on."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        super().__init__(shell=shell)
        self._shell = shell
        self._auto = auto
        self.place = workplace()
        self.pool = self.place.pool
        self.warmth = Warmth(self.pool)
        self._board = StatusBoard(self.place.pools, self.place.settings.status_idle_s)

    def close(self) -> None:
        """End the sessions and close the link to the pool; the pool goes on for others."""
        self._board.close()
        registry.close_all()
        close_workplace()

    @cell_magic
    def distributed(self, line: str, cell_body: str) -> RunResult | None:
        """Run this cell on N ranks of a pool. `%%distributed -h` shows the options."""
        return self._run("%%distributed", line, cell_body)

    @cell_magic
    def rank(self, line: str, cell_body: str) -> RunResult | None:
        """Run this cell on some ranks of the connected session: `%%rank 0`. `%%rank -h` shows the options."""
        return self._run("%%rank", line, cell_body)

    @cell_magic
    def ray_launch(self, line: str, cell_body: str) -> RunResult | None:
        """Run this cell as the driver of a Ray cluster of its own. `%%ray_launch -h` shows the options."""
        return self._run(arguments.RAY, line, cell_body)

    @cell_magic
    def sgpu_auto_cell(self, line: str, cell_body: str) -> RunResult:
        """What `%sgpu_auto` makes of a plain cell."""
        session = registry.chosen()
        self.place.notices.clear()
        return session.run_cell(SessionCell(body=cell_body, auto=True))

    def _run(self, magic: str, line: str, cell_body: str) -> RunResult | None:
        options = arguments.parse(line, magic)
        if options.help:
            print(arguments.parser(magic).format_help())  # noqa: T201  help is output
            return None
        self.place.wanted_pool(options.pool)
        if not cell.has_code(cell_body):
            print("the cell is empty: no rank was started.")  # noqa: T201
            return None
        magic_line = f"{magic} {line}".strip()
        session = session_for(options, magic)
        self.place.notices.clear()
        if session is not None and not options.fresh:
            return session.run_cell(cell.for_session(magic_line, cell_body, options, session), options.ui)
        return self._run_fresh(magic_line, cell_body, options, session, ray=magic == arguments.RAY)

    def _run_fresh(
        self,
        magic_line: str,
        cell_body: str,
        options: arguments.CellOptions,
        session: Session | None,
        *,
        ray: bool,
    ) -> RunResult | None:
        if session is not None:
            found = session.checked().lends(options.ranks)
        else:
            options = with_notebooks_choice(self.place, options)
            found = self.place.find(self.place.wanted_pool(options.pool), options.devices)
        try:
            submission = cell.prepare(magic_line, cell_body, options, self._shell, found, session, ray=ray)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the run was submitted; nothing was started.") from None
        run = submit(found.pool, submission)
        followed = self.place.followed(run, options.ui)
        try:
            if options.detach:
                run_loop.leave(followed)
                return None
            return run_loop.bring_back(followed, self._shell.user_ns, self.place.restarts)
        finally:
            if session is None and found.pool is self.pool:
                self.warmth.ran(found.placement.ranks)
            let_go(found.pool, run)

    @line_magic
    def sgpu_attach(self, line: str = "") -> RunResult | None:
        """Show a run from its beginning and bring its results back: `%sgpu_attach [RUN] [--ui auto|text|none]`."""
        about = "Show a run from its beginning as if its cell had run here, and bring its results back."
        options = self._run_options("%sgpu_attach", about, line, ui=True)
        if options is None:
            return None
        try:
            run, state = self.place.attach(options.run)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the pool had answered; its runs go on.") from None
        try:
            followed = self.place.followed(run, options.ui)
            return run_loop.watch(followed, state, self._shell.user_ns)
        finally:
            run.close()

    @line_magic
    def sgpu_detach(self, line: str = "") -> None:
        """Let a run go on without its notebook: `%sgpu_detach [RUN]`; all runs of this notebook without RUN."""
        about = "Let a run go on whatever becomes of its notebook; all runs of this notebook without RUN."
        options = self._run_options("%sgpu_detach", about, line)
        if options is not None:
            print(self._detach(options.run))  # noqa: T201

    @line_magic
    def sgpu_stacks(self, line: str = "") -> None:
        """Show where every rank of a run is: `%sgpu_stacks [RUN]`."""
        options = self._run_options("%sgpu_stacks", "Show where every rank of a run is.", line)
        if options is None:
            return
        answer = self.place.pool_with(options.run, going_on=True).stacks(options.run, start=True)
        told = (answer.run_id, answer.stacks, answer.cell)
        self._publish(stacks_text(*told), {"text/html": stacks_html(*told)})

    @line_magic
    def sgpu_status(self, line: str = "") -> None:
        """Show devices, queue and runs, or one run's view: `%sgpu_status [RUN] [--pool NAME] [--ui auto|text|none]`."""
        about = "Show the devices, the queue and the runs of all pools; or the view of one run or session."
        options = self._run_options("%sgpu_status", about, line, ui=True, sessions=True)
        if options is None:
            return
        if options.run:
            run, state = self.place.attach(options.run)
            followed = self.place.followed(run, options.ui, error_follows=False)
            self.place.windows.open(followed, state, live=self.place.live_views.is_watched and options.ui != "text")
        elif self.place.is_notebook:
            self._board.show(self.place.live_views.is_watched, options.pool)
        else:
            print(self._board.text(options.pool))  # noqa: T201

    @line_magic
    def sgpu_help(self, line: str = "") -> None:
        """Show the page about an error: `%sgpu_help [TOPIC]`; without TOPIC the list of all."""
        markdown = help_pages.page(line.strip())
        self._publish(help_pages.plain(markdown), {"text/markdown": markdown})

    def _detach(self, run: str) -> str:
        """Let a run go on, of all of this notebook's pools where none is named."""
        pools = [self.place.pool_with(run, going_on=True)] if run else self.place.pools.connected() or [self.place.pool]
        return " ".join(pool.detach(run, start=True) for pool in pools)

    def _run_options(
        self, magic: str, about: str, line: str, *, ui: bool = False, sessions: bool = False
    ) -> line_arguments.RunOptions | None:
        """Read the line; None when help was asked for, which is printed."""
        parser = line_arguments.run_parser(magic, about, ui=ui, sessions=sessions)
        return line_arguments.read_run(parser, line, _session_run if sessions else lambda name: "")

    def _publish(self, text: str, rich: dict[str, str]) -> None:
        from IPython.display import publish_display_data

        if self.place.is_notebook:
            publish_display_data({"text/plain": text, **rich})
        else:
            print(text)  # noqa: T201


def _session_run(name: str) -> str:
    session = registry.find(name) if name else None
    return session.run_id if session is not None else ""
