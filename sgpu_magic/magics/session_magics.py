"""The magics of a session: connect, disconnect, push, pull, restart, auto."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.magics import line_arguments
from sgpu_magic.magics.auto import AutoMode
from sgpu_magic.runs.choice.default_choice import MAGIC_WAYS
from sgpu_magic.runs.option_values import parse_ranks
from sgpu_magic.runs.sessions import registry, run_in
from sgpu_magic.runs.sessions.cells import prepare_push
from sgpu_magic.runs.sessions.connecting import begin, is_same, with_notebooks_choice
from sgpu_magic.runs.sessions.lifetime import current_cell
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.workplace import workplace


@magics_class
class SessionMagics(Magics):
    """`%sgpu_connect` and what one does with a session."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode) -> None:
        super().__init__(shell=shell)
        self._auto = auto
        self.place = workplace()

    @line_magic
    def sgpu_connect(self, line: str = "") -> Session | None:
        """Start ranks that stay between cells: `%sgpu_connect --gpus 4 --type a10 [--name S]`; -h shows the options."""
        options = line_arguments.read_connect(line_arguments.connect_parser(), line)
        if options is None:
            return None
        ask = options.ask
        self.place.wanted_pool(ask.pool)
        known = registry.find(ask.name)
        if known is not None:
            if not is_same(known, ask):
                raise UsageError(
                    f"session {known.name} is connected already, and has {known.ranks} ranks on {known.device_type}: "
                    f"that is not what is asked for. End it with %sgpu_disconnect {known.name} first, or give the new "
                    "one another --name."
                )
            registry.make_current(known)
            print(f"session {known.name} is connected already ({known.state}); nothing was changed.")  # noqa: T201
            known.shown_in = current_cell(self.place)
            return known
        ask = with_notebooks_choice(self.place, ask, MAGIC_WAYS)
        self.place.notices.clear()
        is_drawn = self.place.is_notebook and self.place.live_views.is_watched and options.ui != "text"
        try:
            session = begin(self.place, ask, options.ui if is_drawn else "none")
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the session was submitted; nothing was started.") from None
        if not is_drawn and options.ui != "none":
            ranks = f"{session.ranks} rank{'s' * (session.ranks > 1)}"
            kind = "" if session.device_type == "any" else f" on {session.device_type}"
            print(  # noqa: T201
                f"session {session.name}: connecting {ranks}{kind} · %%distributed cells run in it from now on, and "
                f"%sgpu_disconnect ends it · run {session.run_id[:8]}"
            )
        session.shown_in = current_cell(self.place)
        return session

    @line_magic
    def sgpu_disconnect(self, line: str = "") -> None:
        """End a session: `%sgpu_disconnect [NAME]`."""
        values = line_arguments.disconnect_parser().asked(line)
        if values is None:
            return
        session = registry.chosen(values.name)
        session.close()
        registry.drop(session)
        left = registry.names()
        now = f"; %%distributed cells run in session {left[-1]} now" if left else ""
        ended = "has ended" if session.has_ended else "is ending"
        print(f"session {session.name} {ended}{now}.")  # noqa: T201

    @line_magic
    def sgpu_pull(self, line: str = "") -> None:
        """Bring names back from the session's ranks: `%sgpu_pull history loss:all [--ranks 0,2]`."""
        about = "Bring names back from the session's ranks into the notebook."
        parser = line_arguments.names_parser("%sgpu_pull", about, pulls=True)
        options = line_arguments.read_names(parser, line, pulls=True)
        if options is None:
            return
        session = registry.chosen(options.session)
        session.pull_into(None, options.names, session.only(options.only or None), options.ui)

    @line_magic
    def sgpu_push(self, line: str = "") -> None:
        """Set names of the notebook on the session's ranks: `%sgpu_push cfg data [--ranks 0,2]`."""
        about = "Set names on the session's ranks to what the notebook has, whatever the ranks have under them."
        parser = line_arguments.names_parser("%sgpu_push", about, pulls=False)
        options = line_arguments.read_names(parser, line, pulls=False)
        if options is None:
            return
        session = registry.chosen(options.session).checked()
        names, only = tuple(output.name for output in options.names), session.only(options.only or None)
        run_in.run_in(session, lambda: prepare_push(session, names, {}, only), options.ui)

    @line_magic
    def sgpu_restart(self, line: str = "") -> None:
        """Replace ranks of the session by new processes: `%sgpu_restart [--rank 1,2]`."""
        values = line_arguments.restart_parser().asked(line)
        if values is None:
            return
        session = registry.chosen(values.session)
        ranks = () if values.ranks is None else parse_ranks("--rank", values.ranks)
        print(session.restart(*ranks))  # noqa: T201

    @line_magic
    def sgpu_auto(self, line: str = "") -> None:
        """Send every plain cell to the session's ranks: `%sgpu_auto on|off`."""
        values = line_arguments.auto_parser().asked(line)
        if values is None:
            return
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
