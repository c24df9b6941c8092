"""The parser of all command lines: errors are `UsageError`s, and a name that does not exist gets a suggestion."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, cast

from sgpu_magic.errors import UsageError


class StrictParser(argparse.ArgumentParser):
    """An argument parser without abbreviated options.

    Attributes:
        pointer: The sentence about the parser's help, with `{prog}` for its name.
    """

    pointer: ClassVar[str] = "`{prog} --help` shows the usage."

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. {self._pointer}", says_remedy=True)

    # typeshed declares overloads by the type of the namespace
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's, but what is not known is an error of this parser, which may be that of a subcommand."""
        words = sys.argv[1:] if args is None else list(args)
        if not self._has_free_words:
            # before argparse, which takes an unknown option's value for an argument
            self._check_options(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self._check_options(rest)
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def arguments(self) -> Iterator[tuple[str, argparse.Action]]:
        """Yield the arguments of this parser and of its subcommands, each with the name of its parser."""
        for action in self._actions:
            yield self.prog, action
            for subparser in self._commands_of(action):
                yield from subparser.arguments()

    @staticmethod
    def _commands_of(action: argparse.Action) -> list[StrictParser]:
        if action.nargs != argparse.PARSER:
            return []
        return list(cast("Mapping[str, StrictParser]", action.choices).values())

    @property
    def _pointer(self) -> str:
        return self.pointer.format(prog=self.prog)

    @property
    def _has_free_words(self) -> bool:
        """Whether words after an argument are another parser's or program's."""
        return any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)

    def _check_options(self, words: Sequence[str]) -> None:
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            # a word with a space is a value, as for argparse
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                raise self._unknown("option", name, self._shown_options())

    def _shown_options(self) -> list[str]:
        visible = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in visible for name in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Called by argparse for each value: one that is not among the choices gets a suggestion."""
        if action.choices is None or value in action.choices:
            return
        if action.nargs == argparse.PARSER:
            raise self._unknown("command", str(value), map(str, action.choices))
        name = "/".join(action.option_strings) or str(action.metavar or action.dest)
        raise UsageError.of_unknown_name(
            f"{self.prog}: {name} has no value `{value}`.",
            str(value),
            map(str, action.choices),
            otherwise=f"The values are {', '.join(map(str, action.choices))}.",
        )

    def _unknown(self, kind: str, name: str, known: Iterable[str]) -> UsageError:
        message = f"{self.prog} has no {kind} `{name}`."
        return UsageError.of_unknown_name(message, name, known, otherwise=self._pointer)
