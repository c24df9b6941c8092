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
from sgpu_magic.render.stacks import stacks_html, stacks_text
from sgpu_magic.runs import follow
from sgpu_magic.runs.submission import let_go, submit
from sgpu_magic.runs.workplace import close_workplace, workplace
from sgpu_magic.sessions import registry
from sgpu_magic.sessions.cells import SessionCell
from sgpu_magic.sessions.session import Session


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
        self._board = StatusBoard(self.pool, self.place.settings.status_idle_s)

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
        settings = self.place.current_settings()
        self.place.check_pool(options.pool or settings.pool)
        cell.check_cell(cell_body, magic)
        magic_line = f"{magic} {line}".strip()
        session = session_for(options, magic)
        self.place.notices.clear()
        if session is not None and not options.fresh:
            return session.run_cell(cell.for_session(magic_line, cell_body, options, session), options.ui)
        return self._run_fresh(magic_line, cell_body, options, session)

    def _run_fresh(
        self, magic_line: str, cell_body: str, options: arguments.CellOptions, session: Session | None
    ) -> RunResult | None:
        if session is not None:
            ranks = options.ranks or session.checked().ranks
        else:
            options = with_notebooks_choice(self.place, options)
            ranks = options.ranks or self.place.default_ranks(options.device_type)
        settings = self.place.current_settings()
        try:
            submission = cell.prepare(magic_line, cell_body, options, self._shell, settings, ranks, session)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the run was submitted; nothing was started.") from None
        run = submit(self.pool, submission)
        followed = self.place.followed(run, options.ui)
        try:
            if options.detach:
                follow.leave(followed)
                return None
            return follow.bring_back(followed, self._shell.user_ns, self.place.restarts)
        finally:
            if session is None:
                self.warmth.ran(ranks)
            let_go(self.pool, run)

    @line_magic
    def sgpu_attach(self, line: str = "") -> RunResult | None:
        """Show a run from its beginning and bring its results back: `%sgpu_attach [RUN] [--ui auto|text|none]`."""
        about = "Show a run from its beginning as if its cell had run here, and bring its results back."
        options = self._run_options("%sgpu_attach", about, line, ui=True)
        if options is None:
            return None
        try:
            run, state = self.pool.attach(options.run)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the pool had answered; its runs go on.") from None
        try:
            followed = self.place.followed(run, options.ui)
            return follow.watch(followed, state, self._shell.user_ns)
        finally:
            run.close()

    @line_magic
    def sgpu_detach(self, line: str = "") -> None:
        """Let a run go on without its notebook: `%sgpu_detach [RUN]`; all runs of this notebook without RUN."""
        about = "Let a run go on whatever becomes of its notebook; all runs of this notebook without RUN."
        options = self._run_options("%sgpu_detach", about, line)
        if options is not None:
            print(self.pool.detach(options.run, start=True))  # noqa: T201

    @line_magic
    def sgpu_stacks(self, line: str = "") -> None:
        """Show where every rank of a run is: `%sgpu_stacks [RUN]`."""
        options = self._run_options("%sgpu_stacks", "Show where every rank of a run is.", line)
        if options is None:
            return
        answer = self.pool.stacks(options.run, start=True)
        told = (answer.run_id, answer.stacks, answer.cell)
        self._publish(stacks_text(*told), stacks_html(*told))

    @line_magic
    def sgpu_status(self, line: str = "") -> None:
        """Show devices, queue and runs, or the view of one run: `%sgpu_status [RUN] [--ui auto|text|none]`."""
        about = "Show the pool's devices, its queue and runs; or the view of one run or session."
        options = self._run_options("%sgpu_status", about, line, ui=True, sessions=True)
        if options is None:
            return
        if options.run:
            run, state = self.pool.attach(options.run)
            followed = self.place.followed(run, options.ui, error_follows=False)
            self.place.windows.open(followed, state, live=self.place.live_views.is_watched and options.ui != "text")
        elif self.place.is_notebook:
            self._board.show(self.place.live_views.is_watched)
        else:
            print(self._board.text())  # noqa: T201

    def _run_options(
        self, magic: str, about: str, line: str, *, ui: bool = False, sessions: bool = False
    ) -> line_arguments.RunOptions | None:
        """Read the line; None when help was asked for, which is printed."""
        parser = line_arguments.run_parser(magic, about, ui=ui, sessions=sessions)
        return line_arguments.read_run(parser, line, _session_run if sessions else lambda name: "")

    def _publish(self, text: str, html: str) -> None:
        from IPython.display import publish_display_data

        if self.place.is_notebook:
            publish_display_data({"text/plain": text, "text/html": html})
        else:
            print(text)  # noqa: T201


def _session_run(name: str) -> str:
    session = registry.find(name) if name else None
    return session.run_id if session is not None else ""
