"""`%sgpu_replay`: a recorded run again, as if its cell ran here."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import RunCancelled
from sgpu_magic.magics.parsing import Parser, add_ui, add_variables, device_type, rank_count, variables
from sgpu_magic.runs.follow import run_loop
from sgpu_magic.runs.option_values import optional_s
from sgpu_magic.runs.submit.submit import let_go, submit
from sgpu_magic.runs.workplace import workplace


@magics_class
class ReplayMagics(Magics):
    """`%sgpu_replay`."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell)
        self._shell = shell

    @line_magic
    def sgpu_replay(self, line: str = "") -> RunResult | None:
        """Launch a run again from its directory: `%sgpu_replay RUN`; -h shows the options."""
        made = parser()
        values = made.asked(line)
        if values is None:
            return None
        if not values.run:
            made.error("which run? Give the first digits of its id, as %sgpu_status lists them")
        # only a replay needs them
        from sgpu_magic.client.files_of_run import recorded_directory
        from sgpu_magic.runs.replay.launching import ReplayOptions, prepare_replay
        from sgpu_magic.runs.replay.recorded import read_recorded

        options = ReplayOptions(
            ranks=values.gpus,
            device_type=device_type(values.type),
            variables=variables(values.env),
            here=values.here,
            timeout_s=optional_s("--timeout", values.timeout),
            name=values.name,
            detach=values.detach,
            ui=values.ui,
        )
        place = workplace()
        settings = place.current_settings()
        place.notices.clear()
        try:
            with recorded_directory(settings, values.run) as directory:
                recorded = read_recorded(directory)
            submission = prepare_replay(place, recorded, options)
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the run was submitted; nothing was started.") from None
        run = submit(place.pool_of(submission), submission)
        followed = place.followed(run, options.ui)
        try:
            if options.detach:
                run_loop.leave(followed)
                return None
            return run_loop.bring_back(followed, self._shell.user_ns, place.restarts)
        finally:
            let_go(place.pool_of(run), run)


def parser() -> Parser:
    """The options of the magic."""
    made = Parser(
        "%sgpu_replay",
        "Launch a run again from its directory, with the same code, variables and packages; what differs on this "
        "machine is said. Names of --out are set here, as the cell did.",
        "The packages are this notebook's when they are the run's, else the run's own Python where it is still as it "
        "was, else they are installed from what was recorded. Values of --env are never recorded: set them here.",
    )
    add = made.add_argument
    add("run", nargs="?", default="", metavar="RUN", help="the first digits of its id")
    add("-n", "--gpus", type=rank_count, metavar="N", help="ranks (default: as many as it had)")
    add("--type", metavar="TYPE", help="a10, h100, ..., cpu, any (default: what it asked for)")
    add_variables(made)
    add("--here", action="store_true", help="with this notebook's packages, whatever it had")
    add("--timeout", metavar="90s|30m|2h", help="longest running time (default: its own)")
    add("--detach", action="store_true", help="return at once; the run goes on without this notebook")
    add("--name", default="", help="the run's name (default: its own)")
    add_ui(made)
    made.offer_help()
    return made
