# PYTHON_ARGCOMPLETE_OK
"""Entry point of the `sgpu` command: the top-level parser, exit codes, and option types that the commands share."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sgpu_magic import __version__
from sgpu_magic.errors import SgpuError, UsageError
from sgpu_magic.options.strict_parser import StrictParser

_PAIRED = {"-p": "--parameters", "--parameters": "--parameters", "-r": "--raw", "--raw": "--raw"}
_OK, _FAILED, _USAGE = 0, 1, 2
_INTERRUPTED = 128 + signal.SIGINT
# a shell's exit code for a program killed by SIGPIPE
_NOBODY_READS = 128 + 13
# module, what the command does, and an example
_COMMANDS = {
    "status": ("status", "show the pools' devices, queue and runs", "sgpu status --pool team"),
    "pool": ("pools", "manage pools: show, list, serve, stop", "sgpu pool list"),
    "types": ("pools", "list the pools' GPU types with memory, nodes and price", "sgpu types --pool team"),
    "runs": ("runs", "list the most recent runs", "sgpu runs --state failed --since 7d"),
    "logs": ("logs", "print the output of a run", "sgpu logs 7f3a --rank 1 --follow"),
    "cancel": ("runs", "stop a run", "sgpu cancel 7f3a"),
    "detach": ("runs", "let a run continue without its notebook", "sgpu detach 7f3a"),
    "stacks": ("runs", "show where every rank of a run is", "sgpu stacks 7f3a"),
    "run": ("run", "execute a notebook, script or job file", "sgpu run train.ipynb --gpus 4 -p lr=0.01"),
    "torchrun": (
        "torchrun",
        "start a script with torchrun's options",
        "sgpu torchrun --nproc-per-node 4 train.py --lr 0.01",
    ),
    "jobs": ("jobs", "list the jobs of `sgpu run`", "sgpu jobs -n 5"),
    "cp": ("copying", "copy files of a run to this machine", "sgpu cp 7f3a:checkpoints ."),
    "port-forward": ("forwarding", "reach a dashboard or TensorBoard in a run", "sgpu port-forward 7f3a 6006"),
    "replay": ("replay", "run a recorded run again", "sgpu replay 7f3a --gpus 8"),
    "sync": ("sync", "send to MLflow what could not be sent before", "sgpu sync --list"),
    "env": ("environments", "manage base, saved and built environments", "sgpu env list"),
    "usage": ("usage", "show what runs used and cost", "sgpu usage --by type --since 4w"),
    "help": ("main", "show the page about an error, or list all pages", "sgpu help rank-died"),
    "doctor": ("doctor", "check this machine's set-up", "sgpu doctor"),
}


class CommandParser(StrictParser):
    """The parser of the command or of a subcommand.

    Attributes:
        example: A command line that `--help` shows.
    """

    example: str = ""

    def format_help(self) -> str:
        """Return the help, with the example below it."""
        return f"{super().format_help()}\nexample:\n  {self.example}\n"

    def does(self, do: Callable[[argparse.Namespace], str | int]) -> None:
        """Set the function that executes the command. It returns an exit code, or a text to print."""
        self.set_defaults(do=do)


def add_command(commands: Any, name: str, about: str, example: str) -> CommandParser:
    """Add a subcommand and return its parser.

    Args:
        commands: What `add_subparsers` has returned.
        name: Its name.
        about: What it does, for the list of commands; its own help begins with it, as a sentence.
        example: A command line that shows its use.
    """
    made: CommandParser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    made.example = example
    return made


def note(text: str) -> None:
    """Write a message to standard error, prefixed with `sgpu:`."""
    sys.stdout.flush()
    sys.stderr.write(f"sgpu: {text}\n")


def terminal_width() -> int | None:
    """Return the characters of a line of the terminal that standard output is; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
    parser.example = "sgpu runs --state failed"
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    asked = next((word for word in words if not word.startswith("-")), "")
    for name, (module, about, example) in _COMMANDS.items():
        made = add_command(commands, name, about, example)
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
