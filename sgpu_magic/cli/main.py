"""The `sgpu` command: the pool, its runs and this machine's set-up from a shell."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from sgpu_magic import __version__
from sgpu_magic.cli import pool_options, run_options, serving_options
from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError, UsageError

_OK, _FAILED, _USAGE = 0, 1, 2
_INTERRUPTED = 128 + signal.SIGINT
# what a shell reports of a program that SIGPIPE ended
_NOBODY_READS = 128 + 13
_RECENT = 20


class _Parser(argparse.ArgumentParser):
    """Reports what it does not understand as any other usage error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` shows what there is.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a failure, 2 for usage, 130 for an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # a terminal that lacks a character gets another, never an error
            reconfigure(errors="replace")
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_args(run_options.plain_words(words))
        options.words = words
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # `sgpu logs 7f3a | head`; the interpreter's own last flush must find somebody too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    except SgpuError as error:
        print(f"sgpu: {error.message}\nSee `sgpu help {error.topic}`.", file=sys.stderr)
        return _USAGE if isinstance(error, UsageError) else _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "pool":
            from sgpu_magic.cli import pool

            settings = load_settings()
            if options.action in ("add", "list", "remove"):
                from sgpu_magic.cli import pools

                print(pools.run(settings, options))
            elif options.action in ("serve", "deploy", "undeploy", "keygen", "authorize", "revoke"):
                from sgpu_magic.cli import serving

                print(serving.run(settings, options))
            elif options.action == "status":
                print(pool.status(settings, options.pool))
            else:
                print(pool.stop(settings, force=options.force))
        case "runs":
            from sgpu_magic.cli import runs

            table, note = runs.recent(load_settings(), None if options.all else options.number, options.pool)
            print(table)
            if note:
                _note(note)
        case "logs":
            from sgpu_magic.cli import logs

            logs.show(
                load_settings(),
                options.run,
                rank=options.rank,
                follow=options.follow,
                out=sys.stdout,
                note=_note,
            )
        case "cancel":
            from sgpu_magic.cli import runs

            print(runs.cancel(load_settings(), options.run))
        case "detach":
            from sgpu_magic.cli import runs

            print(runs.detach(load_settings(), options.run))
        case "stacks":
            from sgpu_magic.cli import runs

            print(runs.stacks(load_settings(), options.run))
        case "cp":
            from sgpu_magic.cli import copying

            return copying.copy(
                load_settings(), options.source, options.target, _listing_out(options.target), sys.stdout.buffer, _note
            )
        case "port-forward":
            from sgpu_magic.cli import port_forward, runs

            with runs.pool_of(load_settings(), options.run, "whose ports could be reached") as pool:
                return port_forward.forward(pool, options.run, options.ports, options.rank, sys.stdout, _note)
        case "run":
            from sgpu_magic.cli import run

            return run.run(load_settings(), options, sys.stdout, sys.stderr)
        case "jobs":
            from sgpu_magic.cli import jobs

            settings = load_settings()
            match options.action:
                case "log":
                    jobs.show_log(settings, options.job, sys.stdout)
                case "stop":
                    print(jobs.stop(settings, options.job))
                case _:
                    print(jobs.listing(settings, options.number))
        case "replay":
            from sgpu_magic.cli import replay

            done = replay.replay(load_settings(), options.run, replay.options_from(options), sys.stdout)
            return _OK if done else _FAILED
        case "sync":
            from sgpu_magic.cli import sync

            text, complete = sync.sync(load_settings(), options.run, only_list=options.list)
            print(text)
            return _OK if complete else _FAILED
        case "env":
            from sgpu_magic.cli import environments

            settings = load_settings()
            match options.action:
                case "list":
                    print(environments.listing(settings))
                case "export":
                    print(environments.export(options.name, options.directory))
                case "remove":
                    print(environments.remove(settings, options.name))
                case _:
                    print(environments.prune(settings, options.days))
        case "usage":
            from sgpu_magic.cli import usage_forms
            from sgpu_magic.client import usage

            print(usage_forms.FORMATS[options.format](usage.read_usage(load_settings(), options.since, options.by)))
        case "types":
            from sgpu_magic.cli import pools

            print(pools.types(load_settings(), options.pool))
        case "help":
            from sgpu_magic.views import help as help_pages

            print(help_pages.plain(help_pages.page(options.topic)))
        case "doctor":
            from sgpu_magic.cli import doctor

            return _OK if doctor.run(os.environ, sys.stdout) else _FAILED
        case _:
            _parser().print_help(sys.stderr)
            return _USAGE
    return _OK


def _listing_out(target: str) -> TextIO:
    """Where names and sizes are printed: beside a file that goes to standard output they are in the way."""
    return sys.stderr if target == "-" else sys.stdout


def _note(text: str) -> None:
    sys.stdout.flush()
    print(f"sgpu: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
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
    pool_options.add_actions(actions)
    serving_options.add_actions(actions)
    stop = actions.add_parser("stop", help="end the pool; the next run starts one", allow_abbrev=False)
    stop.add_argument("--force", action="store_true", help="also when runs are going on: they end too")

    pool_options.add_types(commands)

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

    run_options.add_run(commands, _positive)

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
