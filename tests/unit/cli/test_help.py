"""`--help` of every command and subcommand: a sentence, and an example that the command accepts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

import pytest

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.main import CommandParser, command_parser, normalized


def subparsers(parser: argparse.ArgumentParser) -> dict[str, CommandParser]:
    """The parsers of a command's subcommands by name."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def every_parser() -> Iterator[CommandParser]:
    whole = command_parser([])
    yield whole
    for name in subparsers(whole):
        command = subparsers(command_parser([name]))[name]
        yield command
        yield from subparsers(command).values()


EVERY = list(every_parser())


def test_all_are_looked_at():
    assert {"sgpu", "sgpu runs", "sgpu pool serve", "sgpu jobs log", "sgpu env prune"} <= {each.prog for each in EVERY}
    assert len(EVERY) > 35


@pytest.mark.parametrize("parser", EVERY, ids=lambda parser: parser.prog)
def test_it_has_a_sentence_and_an_example_that_works(parser: CommandParser):
    description = (parser.description or "").strip()
    assert description[0].isupper()
    assert description.rstrip(")").endswith((".", ":"))
    command, *words = shlex.split(parser.example)
    assert command == "sgpu"
    assert parser.example.startswith(parser.prog)
    options = command_parser(words).parse_args(normalized(words))
    assert callable(options.do)


def test_the_help_shows_both(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["pool", "stop", "--help"])
    text = capsys.readouterr().out
    assert "Stop the pool; the next run starts it again.\n" in text
    assert text.endswith("\nexample:\n  sgpu pool stop\n")
