"""What the commands' parsers share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sgpu_magic.errors import UsageError

_PAIRED = {"-p": "--parameters", "--parameters": "--parameters", "-r": "--raw", "--raw": "--raw"}


class Parser(argparse.ArgumentParser):
    """Reports what it does not understand as any other usage error, and takes no option for its beginning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` shows what there is.")

    def does(self, do: Callable[[argparse.Namespace], str | int]) -> None:
        """Say what carries the command out: it returns an exit code, or what is printed."""
        self.set_defaults(do=do)


def note(text: str) -> None:
    """Say something about a run that is no output of it."""
    sys.stdout.flush()
    sys.stderr.write(f"sgpu: {text}\n")


def positive(text: str) -> int:
    """Read a number of things."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1_000_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def rank(text: str) -> int:
    """Read a rank."""
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank: 0, 1, 2 ...")
    return int(text)


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
