"""The site's reference is generated from the code, and each entry in it has a description."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sgpu_magic.cli import json_records
from sgpu_magic.cli.main import command_parser
from sgpu_magic.config import Settings
from sgpu_magic.magics import extension  # noqa: F401  fills LINE_PARSERS
from sgpu_magic.options.argparse_form import LINE_PARSERS, parser

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    found = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def actions_of(made: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions_of(command)
        else:
            yield made.prog, action


def test_every_option_has_a_sentence(reference: ModuleType):
    whole = command_parser([])
    parsers = [parser(name) for name in reference.CELL_MAGICS]
    parsers += [make() for make in LINE_PARSERS.values()]
    parsers += [reference._commands(command_parser([name]))[name] for name in reference._commands(whole)]
    mute = {f"{prog} {action.dest}" for made in parsers for prog, action in actions_of(made) if not action.help}
    assert not mute


def test_every_setting_has_a_sentence(reference: ModuleType):
    assert reference.arguments_of(Settings).keys() == set(Settings.__struct_fields__)


def test_every_error_and_message_has_a_sentence(reference: ModuleType):
    reported = [*reference.error_classes()]
    for _, union in reference.LINKS.values():
        reported += reference.records_of(union)
    assert len(reported) > 100
    assert not [one.__name__ for one in reported if one.__doc__ is None]


def test_every_field_of_a_json_document_has_a_sentence(reference: ModuleType):
    reported = reference.arguments_of(json_records.Document).keys()
    for record in reference.json_record_classes():
        assert reported | reference.arguments_of(record).keys() == reported | set(record.__struct_fields__), record


def test_every_tag_and_metric_of_ours_has_a_sentence(reference: ModuleType):
    source = "".join(path.read_text() for path in (ROOT / "sgpu_magic" / "tracking").glob("*.py"))
    assert set(re.findall(r'"(sgpu\.[a-z_]+)', source)) == reference.TAGS.keys()
    assert set(re.findall(r'"(sgpu/[a-z_]+)"', source)) == {name for name in reference.METRICS if name[:5] == "sgpu/"}


def test_the_pages_are_written(reference: ModuleType, tmp_path: Path):
    (tmp_path / "learn").mkdir()
    reference.write(tmp_path)
    assert "| `keep_runs` | `500` | Ended runs" in (tmp_path / "reference" / "settings.md").read_text()
    assert "`--placement pack\\|strict_pack\\|spread`" in (tmp_path / "reference" / "magics.md").read_text()
    assert "### `sgpu pool serve`" in (tmp_path / "reference" / "command.md").read_text()
    documents = (tmp_path / "reference" / "json.md").read_text()
    assert "| `sgpu pool list --json` | [PoolList](#poollist) |" in documents
    assert "| `duration_s` | number or null | Seconds since its ranks started" in documents
    assert "| `runs` | list: [RunRow](#runrow) |" in documents
    assert "../troubleshooting/room.md" in (tmp_path / "reference" / "errors.md").read_text()
    assert "### `OutputWritten`" in (tmp_path / "reference" / "wire.md").read_text()
    assert (tmp_path / "troubleshooting" / "hang.md").exists()
    assert (tmp_path / "learn" / "notebooks" / "quickstart.ipynb").exists()
