"""The magics of sessions: connect, disconnect, push, pull, restart, auto."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from argparse import Namespace
from typing import TypeVar

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.magics.cell_hooks import AutoMode
from sgpu_magic.options.argparse_form import Parser, add_option, add_session, read_session, takes
from sgpu_magic.options.values import names, outputs_from, parse_ranks
from sgpu_magic.runs.notebook import cell_number
from sgpu_magic.runs.sessions import registry, run_in
from sgpu_magic.runs.sessions.fit import is_same
from sgpu_magic.runs.sessions.registry import begin
from sgpu_magic.runs.sessions.run_in import prepare_push
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.workplace import workplace

T = TypeVar("T")


def _add_name(made: Parser) -> None:
    made.add_argument("name", nargs="?", default="", metavar="NAME", help="session (default: the current one)")


def _add_pulled(made: Parser) -> None:
    what = "rank 0's value, or with :all a list of every rank's"
    made.add_argument("names", nargs="*", metavar="NAME[:all]", help=what)
    _add_ranks(made)


def _add_pushed(made: Parser) -> None:
    made.add_argument("names", nargs="*", metavar="NAME", help="names in the notebook")
    _add_ranks(made)


def _add_ranks(made: Parser) -> None:
    add_option(made, "ranks", help="only these ranks (default: all)")
    add_option(made, "session", metavar="NAME")
    add_option(made, "ui")


def _add_restarted(made: Parser) -> None:
    made.add_argument("--rank", "--ranks", dest="ranks", metavar="1,2", help="ranks to restart (default: all)")
    add_option(made, "session", metavar="NAME")


def _add_switch(made: Parser) -> None:
    made.add_argument("switch", nargs="?", choices=("on", "off"), help="on or off (default: show which)")


@magics_class
class SessionMagics(Magics):
    """`%sgpu_connect` and the magics for a connected session."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        super().__init__(shell=shell)
        self._auto = auto
        self.place = workplace()

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
        self.place.wanted_pool(options.pool)
        known = registry.find(options.name)
        if known is not None:
            if not is_same(known, options):
                raise UsageError(
                    f"session {known.name} is already connected with {known.ranks} ranks on {known.device_type}, "
                    f"which is not what was requested. End it with %sgpu_disconnect {known.name} first, or give the "
                    "new one another --name."
                )
            registry.add(known)
            print(f"session {known.name} is already connected ({known.state}); nothing was changed.")  # noqa: T201
            known.shown_in = cell_number(self.place.shell)
            return known
        ui = options.ui
        self.place.notices.clear()
        is_drawn = self.place.is_notebook and self.place.live_views.is_watched and ui != "text"
        try:
            session = begin(self.place, options, ui if is_drawn else "none")
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the session was submitted; nothing was started.") from None
        if not is_drawn and ui != "none":
            ranks = f"{session.ranks} rank{'s' * (session.ranks > 1)}"
            kind = "" if session.device_type == "any" else f" on {session.device_type}"
            print(  # noqa: T201
                f"session {session.name}: connecting {ranks}{kind} · %%distributed cells run in it from now on, and "
                f"%sgpu_disconnect ends it · run {session.run_id[:8]}"
            )
        session.shown_in = cell_number(self.place.shell)
        return session

    @line_magic
    @takes("End a session: its ranks' variables are lost, and its devices are free again.", _add_name)
    def sgpu_disconnect(self, values: Namespace) -> None:
        """End a session: `%sgpu_disconnect [NAME]`."""
        session = registry.chosen(values.name)
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
        session, only = _chosen(values)
        session.pull_into(None, found, only, values.ui)

    @line_magic
    @takes("Set variables on the session's ranks to the notebook's values, replacing what the ranks have.", _add_pushed)
    def sgpu_push(self, values: Namespace) -> None:
        """Set names of the notebook on the session's ranks: `%sgpu_push cfg data [--ranks 0,2]`."""
        found = _some("%sgpu_push", names("%sgpu_push", values.names), "cfg")
        session, only = _chosen(values)
        session.checked()
        run_in.run_in(session, lambda: prepare_push(session, found, {}, only), values.ui)

    @line_magic
    @takes(
        "Replace ranks of the session with new processes. Variables that the notebook shipped to them are sent again; "
        "those that cells set there are lost, which is reported.",
        _add_restarted,
    )
    def sgpu_restart(self, values: Namespace) -> None:
        """Replace ranks of the session with new processes: `%sgpu_restart [--rank 1,2]`."""
        session = registry.chosen(values.session)
        ranks = () if values.ranks is None else parse_ranks("--rank", values.ranks)
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
            session = registry.chosen()
            self._auto.is_on = True
            print(  # noqa: T201
                f"%sgpu_auto is on: every plain cell runs on the ranks of session {session.name} until %sgpu_auto off."
            )
            return
        was_on, self._auto.is_on = self._auto.is_on, self._auto.is_on and values.switch is None
        is_on = "on" if self._auto.is_on else "off"
        print(f"%sgpu_auto is {is_on}{'' if was_on == self._auto.is_on else ': plain cells run here'}.")  # noqa: T201


def _some(magic: str, found: tuple[T, ...], example: str) -> tuple[T, ...]:
    if not found:
        raise UsageError(f"{magic} takes names, such as {magic} {example}.")
    return found


def _chosen(values: Namespace) -> tuple[Session, tuple[int, ...]]:
    """Return the session that a line names and the chosen ranks, empty for all."""
    only = None if values.ranks is None else parse_ranks("--ranks", values.ranks)
    session = registry.chosen(values.session)
    return session, session.only(only)
