"""The `sgpu` command: the pool, its runs and this machine's set-up from a shell."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from sgpu_magic.cli import parser
from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError, UsageError

_OK, _FAILED, _USAGE = 0, 1, 2
_INTERRUPTED = 128 + signal.SIGINT
# what a shell reports of a program that SIGPIPE ended
_NOBODY_READS = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a failure, 2 for usage, 130 for an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # a terminal that lacks a character gets another, never an error
            reconfigure(errors="replace")
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        options = parser.command_parser().parse_args(parser.plain_words(words))
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
            from sgpu_magic.cli import pools

            settings = load_settings()
            if options.action in ("add", "list", "remove"):
                print(pools.run(settings, options))
            elif options.action in ("serve", "deploy", "undeploy", "keygen", "authorize", "revoke"):
                from sgpu_magic.cli import serving

                print(serving.run(settings, options))
            elif options.action == "status":
                print(pools.status(settings, options.pool))
            else:
                print(pools.stop(settings, force=options.force))
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
            from sgpu_magic.cli import usage
            from sgpu_magic.client.ledger import read_usage

            print(usage.FORMATS[options.format](read_usage(load_settings(), options.since, options.by)))
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
            parser.command_parser().print_help(sys.stderr)
            return _USAGE
    return _OK


def _listing_out(target: str) -> TextIO:
    """Where names and sizes are printed: beside a file that goes to standard output they are in the way."""
    return sys.stderr if target == "-" else sys.stdout


def _note(text: str) -> None:
    sys.stdout.flush()
    print(f"sgpu: {text}", file=sys.stderr)
