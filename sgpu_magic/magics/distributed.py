"""The magics themselves."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.magics import arguments, cell, follow
from sgpu_magic.magics.notices import NoticeBoard
from sgpu_magic.magics.restarts import watch_restarts
from sgpu_magic.magics.status import RunWindows, StatusBoard
from sgpu_magic.magics.warmth import Warmth
from sgpu_magic.protocol.ids import short
from sgpu_magic.render.stacks import stacks_html, stacks_text
from sgpu_magic.render.view import RunView
from sgpu_magic.widget.live_views import Buttons, LiveViews


@magics_class
class DistributedMagics(Magics):
    """`%%distributed`, `%sgpu_status`, and what one does with a run that goes on."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell)
        self._shell = shell
        self.settings = load_settings()
        self._notices = NoticeBoard(is_notebook(shell))
        self.pool = Pool(self.settings, self._notices.notice)
        self.warmth = Warmth(self.pool)
        self._board = StatusBoard(self.pool, self.settings.status_idle_s)
        self._windows = RunWindows()
        kernel = getattr(shell, "kernel", None)
        self._live_views = LiveViews(kernel)
        self.restarts = watch_restarts(kernel, self.pool, detaches=self.settings.detach_on_restart)

    def close(self) -> None:
        """Close the link to the pool; the pool goes on for others."""
        if self.restarts is not None:
            self.restarts.remove()
        self._board.close()
        self._windows.close()
        self._live_views.close()
        self.pool.close()

    @cell_magic
    def distributed(self, line: str, cell_body: str) -> RunResult | None:
        """Run this cell on N ranks of a pool. `%%distributed -h` shows the options."""
        options = arguments.parse(line)
        if options.help:
            print(arguments.parser().format_help())  # noqa: T201  help is output
            return None
        settings = self._current_settings()
        self._check_pool(options.pool or settings.pool)
        cell.check_cell(cell_body)
        ranks = options.ranks or self._default_ranks(options.device_type)
        self._notices.clear()
        try:
            submission = cell.prepare(line, cell_body, options, self._shell, settings, ranks)
            run = self.pool.submit(submission.spec, submission.packed, submission.key, submission.environ)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the pool had taken the run; nothing was started.") from None
        followed = self._followed(run, options.ui, settings)
        try:
            if options.detach:
                follow.leave(followed)
                return None
            return follow.bring_back(followed, self._shell.user_ns, self.restarts)
        finally:
            self.warmth.ran(ranks)
            self.pool.run_over(run.run_id)
            run.close()

    @line_magic
    def sgpu_attach(self, line: str = "") -> RunResult | None:
        """Show a run from its beginning and bring its results back: `%sgpu_attach [RUN] [--ui auto|text|none]`."""
        options = arguments.parse_run("%sgpu_attach", line, ui=True)
        try:
            run, state = self.pool.attach(options.run)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the pool had answered; its runs go on.") from None
        try:
            followed = self._followed(run, options.ui, self._current_settings())
            return follow.watch(followed, state, self._shell.user_ns)
        finally:
            run.close()

    @line_magic
    def sgpu_detach(self, line: str = "") -> None:
        """Let a run go on without its notebook: `%sgpu_detach [RUN]`; all runs of this notebook without RUN."""
        options = arguments.parse_run("%sgpu_detach", line)
        print(self.pool.detach(options.run, start=True))  # noqa: T201

    @line_magic
    def sgpu_stacks(self, line: str = "") -> None:
        """Show where every rank of a run is: `%sgpu_stacks [RUN]`."""
        options = arguments.parse_run("%sgpu_stacks", line)
        answer = self.pool.stacks(options.run, start=True)
        told = (answer.run_id, answer.stacks, answer.cell)
        self._publish(stacks_text(*told), stacks_html(*told))

    @line_magic
    def sgpu_status(self, line: str = "") -> None:
        """Show devices, queue and runs, or the view of one run: `%sgpu_status [RUN] [--ui auto|text|none]`."""
        options = arguments.parse_run("%sgpu_status", line, ui=True)
        if options.run:
            run, state = self.pool.attach(options.run)
            followed = self._followed(run, options.ui, self._current_settings(), error_follows=False)
            self._windows.open(followed, state, live=self._live_views.is_watched and options.ui != "text")
        elif is_notebook(self._shell):
            self._board.show(self._live_views.is_watched)
        else:
            print(self._board.text())  # noqa: T201

    def _publish(self, text: str, html: str) -> None:
        from IPython.display import publish_display_data

        if is_notebook(self._shell):
            publish_display_data({"text/plain": text, "text/html": html})
        else:
            print(text)  # noqa: T201

    def _followed(self, run: Run, ui: str, settings: Settings, *, error_follows: bool = True) -> follow.Followed:
        view = RunView(run.spec, settings.output_limit, pool=self.pool.name, error_follows=error_follows)
        view.directory = str(run.directory)
        publisher = self._live_views.publisher_for(ui, view, sys.stdout, self._buttons(run))
        return follow.Followed(run, view, publisher, self.pool)

    def _buttons(self, run: Run) -> Buttons:
        """What the buttons of a run's view do; they are pressed in other threads than the cell's."""

        def cancel() -> str:
            run.cancel("Cancel was pressed")
            return f"run {short(run.run_id)} is being stopped"

        def stacks() -> list[str]:
            answer = self.pool.stacks(run.run_id)
            return stacks_text(answer.run_id, answer.stacks, answer.cell).splitlines()

        return Buttons(run.directory, cancel, stacks)

    def _current_settings(self) -> Settings:
        """Settings that `%env` may have changed since; where the pool lives stays."""
        return load_settings()

    def _check_pool(self, name: str) -> None:
        if name != self.pool.name:
            raise UsageError(
                f"there is no pool named {name!r}. You have: {self.pool.name}. Leave --pool out to use it."
            )

    def _default_ranks(self, device_type: str | None) -> int:
        if device_type == "cpu":
            return cell.default_ranks(0)
        status = self.pool.status(recent=0)
        types: dict[str, int] = {}
        for device in status.inventory.devices if status is not None else ():
            types[device.type] = types.get(device.type, 0) + 1
        if device_type not in (None, "any"):
            return cell.default_ranks(types.get(str(device_type), 0))
        if len(types) > 1:
            listed = ", ".join(f"{count} {name}" for name, count in types.items())
            raise UsageError(
                f"this pool has several types ({listed}): say how many of which with --gpus N --type TYPE."
            )
        return cell.default_ranks(sum(types.values()))


def is_notebook(shell: Any) -> bool:
    """Whether a front end that draws HTML is behind this shell: any Jupyter kernel, no terminal."""
    return hasattr(shell, "kernel")
