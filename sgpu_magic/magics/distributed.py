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
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.magics import arguments, cell, follow
from sgpu_magic.magics.warmth import Warmth
from sgpu_magic.render.publisher import publisher_for
from sgpu_magic.render.status import status_html, status_text
from sgpu_magic.render.view import RunView


@magics_class
class DistributedMagics(Magics):
    """`%%distributed` and `%sgpu_status`."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell)
        self._shell = shell
        self.settings = load_settings()
        self.pool = Pool(self.settings)
        self.warmth = Warmth(self.pool)

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
        try:
            submission = cell.prepare(line, cell_body, options, self._shell, settings, ranks)
            run = self.pool.submit(submission.spec, submission.packed, submission.key, submission.environ)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the pool had taken the run; nothing was started.") from None
        view = RunView(submission.spec, settings.output_limit, pool=self.pool.name, error_follows=True)
        publisher = publisher_for(options.ui, view, sys.stdout, notebook=is_notebook(self._shell))
        try:
            return follow.bring_back(run, view, publisher, self._shell.user_ns, settings)
        finally:
            self.warmth.ran(ranks)
            self.pool.run_over(run.run_id)
            run.close()

    @line_magic
    def sgpu_status(self, line: str = "") -> None:
        """Show the pool's devices, its queue, running and recent runs."""
        if line.strip():
            raise UsageError(f"%sgpu_status takes nothing, not {line.strip()!r}.")
        status = self.pool.status()
        if status is None:
            return
        from IPython.display import publish_display_data

        if is_notebook(self._shell):
            publish_display_data({"text/plain": status_text(status), "text/html": status_html(status)})
        else:
            print(status_text(status))  # noqa: T201

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
