"""The magics for sessions, such as `%sgpu_connect`, and `%sgpu_env` for packages."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from argparse import Namespace
from typing import TypeVar

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class
from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.formatting import count_of
from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.magics.run_magics import interrupted
from sgpu_magic.options.argparse_form import OptionParser, add_option, add_session, read_session, takes
from sgpu_magic.options.option_records import is_same
from sgpu_magic.options.rank_lists import parse_ranks
from sgpu_magic.options.values import names, outputs_from
from sgpu_magic.panel.kernel_endpoint import KernelEndpoint
from sgpu_magic.runs import packages
from sgpu_magic.runs.environments import report
from sgpu_magic.runs.kernel_context import kernel_context
from sgpu_magic.runs.notebook import cell_number, publish
from sgpu_magic.runs.sessions import cell_runner, registry
from sgpu_magic.runs.sessions.cell_runner import prepare_push
from sgpu_magic.runs.sessions.rank_variables import list_variables
from sgpu_magic.runs.sessions.registry import begin
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit import target
from sgpu_magic.views.pool_tables import environment_html, environment_text
from sgpu_magic.views.variable_table import variables_html, variables_text
from sgpu_magic.wire.devices import type_label

T = TypeVar("T")


def _add_name(made: OptionParser) -> None:
    made.add_argument("name", nargs="?", default="", metavar="NAME", help="session (default: the current one)")


def _add_pulled(made: OptionParser) -> None:
    what = "rank 0's value, or with :all a list of every rank's"
    made.add_argument("names", nargs="*", metavar="NAME[:all]", help=what)
    _add_ranks(made)


def _add_pushed(made: OptionParser) -> None:
    made.add_argument("names", nargs="*", metavar="NAME", help="names in the notebook")
    _add_ranks(made)


def _add_listed(made: OptionParser) -> None:
    made.add_argument("names", nargs="*", metavar="NAME", help="names, or patterns such as loss* (default: all)")
    made.add_argument("--rank", "--ranks", dest="ranks", metavar="1,2", help="only these ranks (default: all)")
    add_option(made, "session", metavar="NAME")


def _add_ranks(made: OptionParser) -> None:
    add_option(made, "ranks", help="only these ranks (default: all)")
    add_option(made, "session", metavar="NAME")
    add_option(made, "ui")


def _add_restarted(made: OptionParser) -> None:
    made.add_argument("--rank", "--ranks", dest="ranks", metavar="1,2", help="ranks to restart (default: all)")
    add_option(made, "session", metavar="NAME")


def _add_switch(made: OptionParser) -> None:
    made.add_argument("switch", nargs="?", choices=("on", "off"), help="on or off (default: show which)")


def _add_arguments(made: OptionParser) -> None:
    made.add_argument("action", nargs="?", metavar="save", help="save the packages under NAME")
    made.add_argument("name", nargs="?", metavar="NAME", help="name of the environment")
    what = "also show differences from a base environment, a requirements or pylock file, or a saved environment"
    made.add_argument("--diff", default="", metavar="4|ai-4|FILE|NAME", help=what)
    what = "confirm the choice that came with this notebook, so that a bare %%%%distributed uses them"
    made.add_argument("--accept", action="store_true", help=what)
    what = "open a panel to choose GPUs and packages, connect, and follow runs"
    made.add_argument("--panel", action="store_true", help=what)


@magics_class
class SessionMagics(Magics):
    """`%sgpu_connect`, the magics for a connected session, and `%sgpu_env`."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode, endpoint: KernelEndpoint) -> None:
        super().__init__(shell=shell)
        self._auto = auto
        self._endpoint = endpoint
        self.context = kernel_context()

    @line_magic
    @takes(
        "Connect: take devices and start ranks that stay alive. From then on %%distributed cells run on them, and "
        "models, process groups and imports are kept between cells. %sgpu_disconnect ends it.",
        add_session,
        "The magic returns at once; its value is the session: s = %sgpu_connect --gpus 4.",
    )
    def sgpu_connect(self, values: Namespace) -> Session:
        """Start ranks that stay alive: `%sgpu_connect --gpus 4 --type a10 [--name S]`; `-h` shows the options."""
        options = read_session(values)
        self.context.wanted_pool(options.pool)
        known = registry.find(options.name)
        if known is not None:
            if not is_same(known, options):
                raise UsageError(
                    f"session {known.name} is already connected with {known.ranks} ranks on "
                    f"{type_label(known.device_type)}, which is not what was requested. End it with "
                    f"%sgpu_disconnect {known.name} first, or give the new one another --name."
                )
            registry.add(known)
            print(f"session {known.name} is already connected ({known.state}); nothing was changed.")  # noqa: T201
            known.shown_in = cell_number(self.context.shell)
            return known
        self.context.notices.show("")
        is_drawn = self.context.is_notebook and self.context.live_views.is_watched and options.ui != "text"
        with interrupted("before the session was submitted; nothing was started."):
            session = begin(self.context, options, options.ui if is_drawn else "none")
        if not is_drawn and options.ui != "none":
            ranks = count_of(session.ranks, "rank")
            kind = "" if session.device_type == "any" else f" on {type_label(session.device_type)}"
            print(  # noqa: T201
                f"session {session.name}: connecting {ranks}{kind} · %%distributed cells run in it from now on, and "
                f"%sgpu_disconnect ends it · run {session.run_id[:8]}"
            )
        session.shown_in = cell_number(self.context.shell)
        return session

    @line_magic
    @takes("End a session: its ranks' variables are lost, and its devices are free again.", _add_name)
    def sgpu_disconnect(self, values: Namespace) -> None:
        """End a session: `%sgpu_disconnect [NAME]`."""
        session = registry.get_session(values.name)
        session.close()
        registry.drop(session)
        left = registry.names()
        now = f"; %%distributed cells run in session {left[-1]} now" if left else ""
        ended = "has ended" if session.has_ended else "is ending"
        print(f"session {session.name} {ended}{now}.")  # noqa: T201

    @line_magic
    @takes("Bring names back from the session's ranks into the notebook.", _add_pulled)
    def sgpu_pull(self, values: Namespace) -> None:
        """Bring names back from the session's ranks: `%sgpu_pull history loss:all [--ranks 0,2]`."""
        found = _some("%sgpu_pull", outputs_from(values.names, "%sgpu_pull"), "history loss:all")
        session, only = _choose(values)
        session.pull_into(None, found, only, values.ui)

    @line_magic
    @takes("Set variables on the session's ranks to the notebook's values, replacing what the ranks have.", _add_pushed)
    def sgpu_push(self, values: Namespace) -> None:
        """Set names of the notebook on the session's ranks: `%sgpu_push cfg data [--ranks 0,2]`."""
        found = _some("%sgpu_push", names("%sgpu_push", values.names), "cfg")
        session, only = _choose(values)
        session.checked()
        cell_runner.run_in(session, lambda: prepare_push(session, found, {}, only), values.ui)

    @line_magic
    @takes(
        "List the variables on the session's ranks with type, shape, dtype, device and size. Ranks that differ from "
        "each other have rows of their own. No code of yours runs for it, and no tensor is copied.",
        _add_listed,
        "Modules and names that begin with _ are left out unless you name them: %sgpu_who _state np.",
    )
    def sgpu_who(self, values: Namespace) -> None:
        """List the variables on the session's ranks: `%sgpu_who [loss* model] [--rank 0,2]`."""
        session = registry.get_session(values.session)
        only = () if values.ranks is None else session.only(parse_ranks("--rank", values.ranks))
        patterns = tuple(filter(None, " ".join(values.names).replace(",", " ").split()))
        listing = list_variables(session, patterns, only)
        self.context.publish(variables_text(listing), {"text/html": variables_html(listing)})

    @line_magic
    @takes(
        "Replace ranks of the session with new processes. Variables that the notebook shipped to them are sent again; "
        "those that cells set there are lost, which is reported.",
        _add_restarted,
    )
    def sgpu_restart(self, values: Namespace) -> None:
        """Replace ranks of the session with new processes: `%sgpu_restart [--rank 1,2]`."""
        session = registry.get_session(values.session)
        ranks = () if values.ranks is None else session.only(parse_ranks("--rank", values.ranks))
        print(session.restart(*ranks))  # noqa: T201

    @line_magic
    @takes(
        "Send every plain cell to the ranks of the current session until it is switched off. Cells that begin with %% "
        "run here, and so do cells with only %sgpu_ magics, %pip, %conda, %env and %load_ext.",
        _add_switch,
    )
    def sgpu_auto(self, values: Namespace) -> None:
        """Send every plain cell to the session's ranks: `%sgpu_auto on|off`."""
        if values.switch == "on":
            where = f"on the ranks of session {registry.get_session().name}"
            self._auto.is_on = True
            print(f"%sgpu_auto is on: every plain cell runs {where} until %sgpu_auto off.")  # noqa: T201
            return
        was_on, self._auto.is_on = self._auto.is_on, self._auto.is_on and values.switch is None
        is_on = "on" if self._auto.is_on else "off"
        print(f"%sgpu_auto is {is_on}{'' if was_on == self._auto.is_on else ': plain cells run here'}.")  # noqa: T201

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
                # imported here: only accepting installs packages
                from sgpu_magic.panel.kernel_actions import accept_choice

                print(accept_choice(self.context))  # noqa: T201
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
        context = self.context
        found = report(context.current_settings(), registry.all_sessions(), compared_to)
        if choice := target.describe_held(context.choice.now(), target.pool_name(context)):
            found = replace(found, lines=(choice, *found.lines))
        context.publish(environment_text(found), {"text/html": environment_html(found)})

    def _panel(self) -> None:
        from sgpu_magic.panel.kernel_state import panel_text

        bundle = self._endpoint.show()
        text = panel_text(self.context)
        if bundle is not None:
            publish({"text/plain": text, **bundle})
        else:
            print(text)  # noqa: T201

    def _save(self, name: str) -> None:
        from sgpu_magic.packages import named_environments

        named_environments.check_name(name)
        ordered = packages.packages_of(self.context.pool).environment()
        kept = ordered.environment
        named_environments.save(self.context.current_settings(), name, kept)
        for note in ordered.notes:
            print(note)  # noqa: T201
        count = f"{kept.packages} packages of Python {kept.python}"
        print(  # noqa: T201
            f"saved {count} as {name}: %%distributed --env-version {name} runs with them, even if other packages "
            "are installed here by then."
        )


def _some(magic: str, found: tuple[T, ...], example: str) -> tuple[T, ...]:
    if not found:
        raise UsageError(f"{magic} takes names, such as {magic} {example}.")
    return found


def _choose(values: Namespace) -> tuple[Session, tuple[int, ...]]:
    """Return the session that a line names and the chosen ranks, empty for all."""
    only = None if values.ranks is None else parse_ranks("--ranks", values.ranks)
    session = registry.get_session(values.session)
    return session, session.only(only)
