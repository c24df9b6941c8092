# PYTHON_ARGCOMPLETE_OK
"""Entry point of the `sgpu` command: the top-level parser, exit codes, and option types that the commands share."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from sgpu_magic import __version__
from sgpu_magic.errors import SgpuError, UsageError
from sgpu_magic.options.strict_parser import StrictParser

_PAIRED = {"-p": "--parameters", "--parameters": "--parameters", "-r": "--raw", "--raw": "--raw"}
_OK, _FAILED, _USAGE = 0, 1, 2
_INTERRUPTED = 128 + signal.SIGINT
# a shell's exit code for a program killed by SIGPIPE
_NOBODY_READS = 128 + 13
_COMMANDS = {
    "status": ("status", "show the pools' devices, queue and runs"),
    "pool": ("pools", "manage pools: show, list, serve, stop"),
    "types": ("pools", "list the pools' GPU types with memory, nodes and price"),
    "runs": ("runs", "list the most recent runs"),
    "logs": ("logs", "print the output of a run"),
    "cancel": ("runs", "stop a run"),
    "detach": ("runs", "let a run continue without its notebook"),
    "stacks": ("runs", "show where every rank of a run is"),
    "run": ("run", "execute a notebook, script or job file"),
    "torchrun": ("torchrun", "start a script with torchrun's options"),
    "jobs": ("jobs", "list the jobs of `sgpu run`"),
    "cp": ("copying", "copy files of a run to this machine"),
    "port-forward": ("forwarding", "reach a dashboard or TensorBoard in a run"),
    "replay": ("replay", "run a recorded run again"),
    "sync": ("sync", "send to MLflow what could not be sent before"),
    "env": ("environments", "manage base, saved and built environments"),
    "usage": ("usage", "show what runs used and cost"),
    "help": ("main", "show the page about an error, or list all pages"),
    "doctor": ("doctor", "check this machine's set-up"),
}


class CommandParser(StrictParser):
    """The parser of the command or of a subcommand."""

    def does(self, do: Callable[[argparse.Namespace], str | int]) -> None:
        """Set the function that executes the command. It returns an exit code, or a text to print."""
        self.set_defaults(do=do)


def note(text: str) -> None:
    """Write a message to standard error, prefixed with `sgpu:`."""
    sys.stdout.flush()
    sys.stderr.write(f"sgpu: {text}\n")


def whole_number(least: int, most: int, what: str) -> Callable[[str], int]:
    """Return the parser of an option from `least` to `most`; `what` names its values in the error."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return read


def add_json(parser: CommandParser, what: str = "print one JSON document instead of text") -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help=what)


positive = whole_number(1, 999_999_999, "a whole number above 0")
rank = whole_number(0, 999_999, "a rank: 0, 1, 2 ...")


def normalized(words: Sequence[str]) -> list[str]:
    """Return the command line in the form that the parser reads.

    For `sgpu run`, papermill's `-p NAME VALUE` becomes `-p NAME=VALUE`, and the script's arguments are removed.
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
    """Return the words after `--`."""
    return tuple(words[list(words).index("--") + 1 :]) if "--" in words else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 for a failure, 2 for usage, 130 for an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # characters that the terminal lacks are replaced instead of raising an error
            stream.reconfigure(errors="replace")
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("sgpu_magic.cli.completion").complete()
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        parser = command_parser(words)
        try:
            options = parser.parse_args(normalized(words))
        except UsageError as error:
            # the message begins with the command
            print(error.message, file=sys.stderr)
            return _USAGE
        options.words = words
        if options.command is None:
            parser.print_help(sys.stderr)
            return _USAGE
        done: str | int = options.do(options)
        if isinstance(done, str):
            print(done)
        sys.stdout.flush()
        return _OK if isinstance(done, str) else done
    except BrokenPipeError:
        # as in `sgpu logs 7f3a | head`; the interpreter's final flush must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    except SgpuError as error:
        print(f"sgpu: {error.message}", file=sys.stderr)
        if error.points_to_help:
            print(f"See `sgpu help {error.topic}`.", file=sys.stderr)
        return _USAGE if isinstance(error, UsageError) else _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def command_parser(words: Sequence[str]) -> CommandParser:
    """Return the top-level parser, with the options of the command that the words name.

    Only that command's module is imported. Its `COMMANDS` maps the command's name to a function that adds the options
    and calls `CommandParser.does`.
    """
    parser = CommandParser(
        prog="sgpu",
        description="Manage the pool behind %%distributed, its runs, and this machine's set-up.",
        epilog="RUN is the ID of a run, or its first digits, as listed by `sgpu runs`.",
    )
    parser.add_argument("--version", action="version", version=f"sgpu-magic {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    asked = next((word for word in words if not word.startswith("-")), "")
    for name, (module, about) in _COMMANDS.items():
        made = commands.add_parser(name, help=about)
        if name == asked:
            importlib.import_module(f"sgpu_magic.cli.{module}").COMMANDS[name](made)
    return parser


def _help_options(parser: CommandParser) -> None:
    about = "topic named by an error (default: list them)"
    parser.add_argument("topic", metavar="TOPIC", nargs="?", default="", help=about)
    parser.does(_help)


def _help(options: argparse.Namespace) -> str:
    from sgpu_magic.views import help as help_pages

    return help_pages.plain(help_pages.page(options.topic))


COMMANDS = {"help": _help_options}
