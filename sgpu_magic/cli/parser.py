"""What `sgpu` takes: its commands and their options. Nothing here loads what a command needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from sgpu_magic import __version__
from sgpu_magic.errors import UsageError


class _Parser(argparse.ArgumentParser):
    """Reports what it does not understand as any other usage error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` shows what there is.")


def command_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = _Parser(
        prog="sgpu",
        description="The pool behind %%distributed, its runs, and this machine's set-up.",
        epilog="RUN is a run's id or its first digits, as `sgpu runs` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sgpu-magic {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    pool = commands.add_parser("pool", help="show or stop this machine's pool", allow_abbrev=False)
    actions = pool.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="devices, queue and runs; starts no pool", allow_abbrev=False)
    status.add_argument("--pool", default="", metavar="NAME", help="of this pool only (default: all that are listed)")
    _add_pool_actions(actions)
    _add_serving_actions(actions)
    stop = actions.add_parser("stop", help="end the pool; the next run starts one", allow_abbrev=False)
    stop.add_argument("--force", action="store_true", help="also when runs are going on: they end too")

    _add_types(commands)

    runs = commands.add_parser("runs", help="list the newest runs", allow_abbrev=False)
    runs.add_argument("--pool", default="", metavar="NAME", help="of this pool only (default: all)")
    how_many = runs.add_mutually_exclusive_group()
    how_many.add_argument("-n", dest="number", type=_positive, default=_RECENT, metavar="N", help="how many (20)")
    how_many.add_argument("--all", action="store_true", help="all of them")

    logs = commands.add_parser("logs", help="print what a run's ranks printed", allow_abbrev=False)
    logs.add_argument("run", metavar="RUN")
    logs.add_argument("--rank", type=_rank, metavar="N", help="of this rank only")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")

    cancel = commands.add_parser("cancel", help="stop a run", allow_abbrev=False)
    cancel.add_argument("run", metavar="RUN")

    detach = commands.add_parser("detach", help="let a run go on without its notebook", allow_abbrev=False)
    detach.add_argument("run", metavar="RUN")

    stacks = commands.add_parser("stacks", help="show where every rank of a run is", allow_abbrev=False)
    stacks.add_argument("run", metavar="RUN")

    _add_run(commands)

    cp = commands.add_parser("cp", help="bring files of a run to this machine", allow_abbrev=False)
    cp.add_argument("source", metavar="RUN[/RANK]:PATH", help="in the ranks' working directory or the run's directory")
    cp.add_argument(
        "target", metavar="TARGET", nargs="?", default="", help="a folder, a file, or - (default: only list)"
    )

    forward = commands.add_parser("port-forward", help="reach a dashboard or TensorBoard in a run", allow_abbrev=False)
    forward.add_argument("run", metavar="RUN")
    forward.add_argument("ports", metavar="[LOCAL:]PORT", help="the port in the run, and the one here if it differs")
    forward.add_argument("--rank", type=_rank, default=0, metavar="N", help="on the node of this rank (0)")

    replay = commands.add_parser("replay", help="launch a run again from its directory", allow_abbrev=False)
    replay.add_argument("run", metavar="RUN")
    replay.add_argument("-n", "--gpus", type=_positive, metavar="N", help="ranks (default: as many as it had)")
    replay.add_argument("--type", metavar="TYPE", help="a10, h100, ..., cpu, any (default: what it asked for)")
    replay.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="set a variable on the ranks")
    replay.add_argument("--here", action="store_true", help="with this Python's packages, whatever it had")
    replay.add_argument("--timeout", metavar="90s|30m|2h", help="longest running time (default: its own)")
    replay.add_argument("--detach", action="store_true", help="return at once; the run goes on by itself")
    replay.add_argument("--name", default="", help="the run's name (default: its own)")

    sync = commands.add_parser("sync", help="send to MLflow what a dead server left unsent", allow_abbrev=False)
    sync.add_argument("run", metavar="RUN", nargs="?", default="", help="of this run only")
    sync.add_argument("--list", action="store_true", help="only say what is unsent")

    env = commands.add_parser("env", help="base, saved and built environments", allow_abbrev=False)
    actions = env.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="those that there are, with their size and last use", allow_abbrev=False)
    export = actions.add_parser("export", help="write a base's requirements file", allow_abbrev=False)
    export.add_argument("name", metavar="4|ai-4")
    export.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where to (default: here)")
    remove = actions.add_parser("remove", help="remove a saved or built environment", allow_abbrev=False)
    remove.add_argument("name", metavar="NAME", help="its name, or the first digits of a built one's")
    prune = actions.add_parser("prune", help="remove built environments that no run uses", allow_abbrev=False)
    prune.add_argument("--days", type=_days, default=0.0, metavar="N", help="only if not used for N days (default: 0)")

    usage = commands.add_parser("usage", help="what runs used and cost", allow_abbrev=False)
    usage.add_argument("--since", default="7d", metavar="7d", help="how far back: 12h, 7d, 4w (7d)")
    groups = ("day", "user", "session", "notebook", "type")
    usage.add_argument("--by", choices=groups, default="day", help="what the rows are (day)")
    usage.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(table)")

    page = commands.add_parser("help", help="show the page about an error, or list them all", allow_abbrev=False)
    page.add_argument("topic", metavar="TOPIC", nargs="?", default="", help="as an error names it (default: list)")

    commands.add_parser("doctor", help="say what is wrong with this machine's set-up", allow_abbrev=False)
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1_000_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank: 0, 1, 2 ...")
    return int(text)


def _add_pool_actions(actions: Any) -> None:
    """Add `sgpu pool add`, `list` and `remove` to the actions of `sgpu pool`."""
    add = actions.add_parser("add", help="list a pool of another machine, for --pool", allow_abbrev=False)
    add.add_argument("name", metavar="NAME", help="as --pool is to take it")
    add.add_argument("address", metavar="tcp://HOST:PORT", help="where it listens")
    add.add_argument("--key", required=True, metavar="KEY", help="its public key, which `sgpu pool serve` prints")
    add.add_argument("--reserved", action="store_true", help="its devices are paid for in any case: it comes first")
    add.add_argument("--types", default="", metavar="a10,h100", help="what it has (default: it is asked each time)")
    add.add_argument("--prices", default="", metavar="a10=1.20", help="of one device for an hour")
    add.add_argument("--replace", action="store_true", help="in place of one of that name")
    add.add_argument("--no-check", action="store_true", help="write it down although it may not be reached")
    actions.add_parser("list", help="the pools that --pool takes, and how they are now", allow_abbrev=False)
    remove = actions.add_parser("remove", help="list a pool no more; its runs go on", allow_abbrev=False)
    remove.add_argument("name", metavar="NAME")


def _add_types(commands: Any) -> None:
    """Add `sgpu types`."""
    types = commands.add_parser("types", help="what the pools have: memory, nodes, price", allow_abbrev=False)
    types.add_argument("--pool", default="", metavar="NAME", help="of this pool only (default: all)")


def _add_serving_actions(actions: Any) -> None:
    """Add them to the actions of `sgpu pool`."""
    serve = actions.add_parser("serve", help="be a pool for other machines, in the foreground", allow_abbrev=False)
    serve.add_argument("--engine", choices=("local", "ray"), default="local", help="where ranks run (local)")
    serve.add_argument("--listen", required=True, metavar="tcp://0.0.0.0:PORT", help="where clients come in")
    _add_name(serve)
    serve.add_argument("--same-files", action="store_true", help="nodes see the clients' files and Pythons: build none")
    deploy = actions.add_parser("deploy", help="start such a pool on a Ray cluster, as a job of it", allow_abbrev=False)
    _add_ray(deploy)
    deploy.add_argument(
        "--listen", default="tcp://0.0.0.0:8700", metavar="tcp://0.0.0.0:PORT", help="where clients come in (port 8700)"
    )
    _add_name(deploy)
    deploy.add_argument("job", nargs="*", metavar="-- OPTIONS", help="of the job, as `ray job submit` has them")
    undeploy = actions.add_parser("undeploy", help="end a pool that was deployed", allow_abbrev=False)
    _add_ray(undeploy)
    _add_name(undeploy)
    keygen = actions.add_parser("keygen", help="make the key by which pools know you", allow_abbrev=False)
    keygen.add_argument("--force", action="store_true", help="in place of the one that there is")
    authorize = actions.add_parser("authorize", help="let a user into a pool that is served here", allow_abbrev=False)
    authorize.add_argument("who", metavar="WHO", help="the user's name, shown with their runs")
    authorize.add_argument("key", metavar="KEY", help="their public key, which `sgpu pool keygen` prints")
    authorize.add_argument("--admin", action="store_true", help="they may end everybody's runs and stop the pool")
    _add_name(authorize)
    revoke = actions.add_parser("revoke", help="let a user in no longer", allow_abbrev=False)
    revoke.add_argument("who", metavar="WHO")
    _add_name(revoke)


def _add_ray(parser: Any) -> None:
    parser.add_argument("--ray", required=True, metavar="http://HEAD:8265", help="Ray's dashboard")


def _add_name(parser: Any) -> None:
    parser.add_argument("--name", default="team", metavar="NAME", help="the served pool's name (team)")


_RECENT = 20
# what these modules define is repeated in short: a command that only parses loads none of them
_RUN_ABOUT = """Execute a notebook to its end and keep the executed copy.

TARGET is a notebook, a script (.py), or a job file (.yaml, .json, .toml) that names one. A notebook is an .ipynb file,
or a .py file in Databricks' source form or with percent cells (# %%); with jupytext any text form of its (.md, .Rmd).

what runs where:
  The notebook's kernel runs on this machine. Its %%distributed cells, sessions and @distributed functions run on
  the pool; what they do not say themselves is taken from --pool, --gpus, --type and so on.
  A notebook that has none of these, run with --gpus or --type, runs on the pool as a whole: a session of that many
  ranks is connected, and every cell runs on all of them (as after %sgpu_auto on). --cells ranks or here says it
  explicitly. A script runs on all ranks; what stands behind -- are its arguments (a .py file with percent cells that
  is given arguments runs as a script). A script with @distributed functions runs once, and they on the ranks.
  What a script prints goes to standard output as it comes; it leaves an executed copy only with --output.
"""
_CODES = """exit codes:
  0    every cell ran
  1    a cell failed: the notebook's own error, or its kernel died
  2    the command, the job file or an option in a cell can't be meant
  3    the pool, a node, the room on it or its environment failed: worth a retry
  124  the time (--timeout, or a run's own) was over
  130  interrupted;  143  terminated: the notebook's runs were ended first
"""
_PAIRED = {"-p": "--parameters", "--parameters": "--parameters", "-r": "--raw", "--raw": "--raw"}


def _add_run(commands: Any) -> None:
    """Add `sgpu run` and `sgpu jobs`."""
    run = commands.add_parser(
        "run",
        help="execute a notebook, script or job file",
        description=_RUN_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = run.add_argument
    add("target", metavar="TARGET")
    add("--pool", default="", help="the pool (default: the setting)")
    add("-n", "--gpus", type=_positive, metavar="N", help="ranks, one per GPU")
    add("--type", metavar="TYPE", help="a10, h100, ..., cpu, any")
    add("--nodes", type=_positive, metavar="N", help="nodes, each with as many of the ranks")
    add("--placement", default="", choices=("pack", "strict_pack", "spread"), help="how ranks lie on nodes (pack)")
    add("--min-memory", default="", metavar="40GB", help="least memory of each device")
    add("--env-version", default="", metavar="4|ai-4|FILE|NAME", help="the ranks' packages")
    add("--max-cost", metavar="5", help="stop each run before it costs more")
    add("-p", "--parameters", dest="parameter", action="append", default=[], metavar="NAME=VALUE",
        help="a parameter: a number, True, False, None, else a text; also as -p NAME VALUE")  # fmt: skip
    add("-r", "--raw", dest="raw_parameter", action="append", default=[], metavar="NAME=VALUE",
        help="a parameter that is a text whatever it looks like")  # fmt: skip
    add(
        "-y",
        dest="parameters_yaml",
        action="append",
        default=[],
        metavar="YAML",
        help="parameters as YAML or JSON text",
    )
    add("-f", "--parameters-file", action="append", default=[], metavar="FILE", help="parameters in YAML, JSON or TOML")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="a variable of the notebook and its ranks")
    add("--upload", action="append", default=[], metavar="PATH", help="a folder or file that the ranks find")
    add(
        "-o",
        "--output",
        default="",
        metavar="COPY",
        help="the executed copy (default: NAME.DATE-TIME.ipynb beside it; none of a script)",
    )
    add("--timeout", metavar="90s|30m|2h", help="longest time for all of it (default: none)")
    add("--retries", type=int, metavar="N", help="run it again after code 3, up to N times (default: 0)")
    add("--kernel", default="", metavar="NAME", help="the Jupyter kernel (default: the notebook's)")
    add("--cells", default="", choices=("auto", "ranks", "here"), help="where plain cells run (auto)")
    add("-v", "--verbose", action="store_true", help="also print what a notebook's cells print")
    add("--detach", action="store_true", help="return at once; it goes on without this terminal")
    add("--job-id", default="", help=argparse.SUPPRESS)
    add("--copy", default="", help=argparse.SUPPRESS)

    jobs = commands.add_parser("jobs", help="list what `sgpu run` executes", allow_abbrev=False)
    jobs.add_argument("-n", dest="number", type=_positive, default=20, metavar="N", help="how many (20)")
    actions = jobs.add_subparsers(dest="action", metavar="ACTION")
    for name, about in (("log", "print what a detached one has said"), ("stop", "end one, and its runs")):
        actions.add_parser(name, help=about, allow_abbrev=False).add_argument("job", metavar="JOB")


def plain_words(words: Sequence[str]) -> list[str]:
    """Return a command line as the parser reads it.

    Of `sgpu run`, papermill's `-p NAME VALUE` becomes `-p NAME=VALUE`, and a script's own arguments are left out.
    """
    if words[:1] != ["run"]:
        return list(words)
    made: list[str] = []
    rest = list(words[: len(words) - len(script_arguments(words))])
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if word in _PAIRED and len(rest) > 1 and rest[0].isidentifier():
            made.append(f"{_PAIRED[word]}={rest.pop(0)}={rest.pop(0)}")
        else:
            made.append(word)
    return made


def script_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Return what stands behind `--`."""
    return tuple(words[list(words).index("--") + 1 :]) if "--" in words else ()
