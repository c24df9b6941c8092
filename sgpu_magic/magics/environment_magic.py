"""`%sgpu_env`: shows the kernel's packages, saves them under a name, accepts a choice, opens the panel."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from argparse import Namespace

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class
from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.options.argparse_form import Parser, takes
from sgpu_magic.panel.kernel_endpoint import KernelEndpoint
from sgpu_magic.runs import packages
from sgpu_magic.runs.choice import default_choice
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.workplace import workplace


def _add_arguments(made: Parser) -> None:
    made.add_argument("action", nargs="?", metavar="save", help="save the packages under NAME")
    made.add_argument("name", nargs="?", metavar="NAME", help="name of the environment")
    made.add_argument(
        "--diff",
        default="",
        metavar="4|ai-4|FILE|NAME",
        help="also show differences from a base environment, a requirements or pylock file, or a saved environment",
    )
    made.add_argument(
        "--accept",
        action="store_true",
        help="confirm choices that somebody else saved in this notebook, so that a bare %%%%distributed uses them",
    )
    made.add_argument(
        "--panel", action="store_true", help="open a panel to choose GPUs and packages, connect, and follow runs"
    )


@magics_class
class EnvironmentMagics(Magics):
    """The magic `%sgpu_env`."""

    def __init__(self, shell: InteractiveShell, door: KernelEndpoint) -> None:
        super().__init__(shell=shell)
        self._door = door

    @line_magic
    @takes(
        "Show the notebook's packages: how many and where from, changes that are not used yet, and what is known to "
        "break.",
        _add_arguments,
        "%sgpu_env save NAME saves them under a name, for --env-version NAME.\n"
        "%sgpu_env --panel shows the panel of JupyterLab's sidebar below the cell, for other front ends.",
    )
    def sgpu_env(self, values: Namespace) -> None:
        """Show the notebook's packages: `%sgpu_env [--diff 4]`, or save them: `%sgpu_env save NAME`."""
        if (values.accept or values.panel) and (values.action or values.diff or (values.accept and values.panel)):
            raise UsageError("%sgpu_env takes --accept and --panel only without other arguments.")
        match values.action:
            case None if values.accept:
                self._accept()
            case None if values.panel:
                self._panel()
            case None:
                self._show(values.diff)
            case "save" if values.name and not values.diff:
                self._save(values.name)
            case "save":
                raise UsageError("%sgpu_env save needs a name: %sgpu_env save mine. --env-version mine then uses it.")
            case _:
                raise UsageError(f"%sgpu_env has no action {values.action!r}. Use %sgpu_env, --diff BASE or save NAME.")

    def _show(self, compared_to: str) -> None:
        from IPython.display import publish_display_data

        # imported here: only the report reads metadata and files
        from sgpu_magic.runs.environment_report import report
        from sgpu_magic.views.pool_tables import environment_html, environment_text

        place = workplace()
        found = report(place.current_settings(), registry.all_sessions(), compared_to)
        choice = default_choice.held_words(place.choice.now(), default_choice.pool_name(place))
        if choice:
            found = replace(found, lines=(choice, *found.lines))
        if place.is_notebook:
            publish_display_data({"text/plain": environment_text(found), "text/html": environment_html(found)})
        else:
            print(environment_text(found))  # noqa: T201

    def _accept(self) -> None:
        # imported here: only accepting installs packages
        from sgpu_magic.panel.kernel_actions import accept_choice

        print(accept_choice(workplace()))  # noqa: T201

    def _panel(self) -> None:
        from IPython.display import publish_display_data

        from sgpu_magic.panel.kernel_state import panel_text

        place = workplace()
        bundle = self._door.show()
        text = panel_text(place)
        if bundle is not None:
            publish_display_data({"text/plain": text, **bundle})
        else:
            print(text)  # noqa: T201

    def _save(self, name: str) -> None:
        from sgpu_magic.packages import named_environments

        place = workplace()
        settings = place.current_settings()
        named_environments.check_name(name)
        ordered = packages.of(place.pool).environment()
        named_environments.save(settings, name, ordered.environment)
        for note in ordered.notes:
            print(note)  # noqa: T201
        kept = ordered.environment
        count = f"{kept.packages} packages of Python {kept.python}"
        print(  # noqa: T201
            f"saved {count} as {name}: %%distributed --env-version {name} runs with them, even if other packages "
            "are installed here by then."
        )
