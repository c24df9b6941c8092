"""The views in the browser: their records are Python's, and the built files are what the sources give."""

from __future__ import annotations

import json
import os
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from npm_packages import GOLDEN, PANEL_GOLDEN, ROOT, SOURCES, npm

from sgpu_magic.panel import messages as panel_messages
from sgpu_magic.panel import schema as panel_schema
from sgpu_magic.runs.choice import schema as choice
from sgpu_magic.views.live import messages, schema

STATIC = ROOT / "sgpu_magic" / "static"
# every widget carries its view to the page: with the table of an out-of-memory 67 kB, a third of that compressed
MOST_BYTES = {"run_view.js": 70_000, "panel.js": 82_000}


# ------------------------------------------------------------------ records


def record_types(*modules: types.ModuleType) -> list[type[schema.Message]]:
    return [
        kind
        for kind in {name: each for module in modules for name, each in vars(module).items()}.values()
        if isinstance(kind, type) and issubclass(kind, schema.Message) and kind is not schema.Message
    ]


_SCALARS: dict[object, list[object]] = {
    int: [7],
    float: [0.5],
    str: ["text <b>"],
    bool: [True, False],
    types.NoneType: [None],
}


def choices(hint: Any) -> list[object]:
    """Return a value of each sort that a field may have: every literal, None where it may be absent."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, schema.Message):
        return [samples(hint)[0]]  # the other ones stand under its own name
    arguments = get_args(hint)
    match get_origin(hint):
        case typing.Literal:
            return list(arguments)
        case types.UnionType | typing.Union:
            return [value for each in arguments for value in choices(each)]
        case origin if origin is tuple and arguments[-1] is ...:
            return [tuple(choices(arguments[0])), ()]
        case origin if origin is tuple:
            return [tuple(choices(each)[0] for each in arguments)]
        case _:
            raise TypeError(f"no sample of {hint}")


def samples(cls: type[schema.Message]) -> list[schema.Message]:
    """Return records of a class: one, then one for each other choice of each of its fields."""
    sorts = {name: choices(hint) for name, hint in get_type_hints(cls).items() if name in cls.__struct_fields__}
    first = cls(**{name: values[0] for name, values in sorts.items()})
    changes = [{name: value} for name, values in sorts.items() for value in values[1:]]
    return [first, *(msgspec.structs.replace(first, **change) for change in changes)]


def golden_text(constants: dict[str, object], kinds: list[type[schema.Message]]) -> str:
    """Return constants and samples of records as a file's text: a line for each sample, as changes are read."""
    written: dict[str, list[object]] = {}
    for cls in kinds:
        assert "id" not in cls.__struct_fields__
        written[cls.__name__] = [json.loads(messages.to_json(record)) for record in samples(cls)]
    named = (
        f"  {json.dumps(name)}: [\n"
        + ",\n".join(f"   {json.dumps(sample, ensure_ascii=False)}" for sample in records)
        + "\n  ]"
        for name, records in written.items()
    )
    return f'{{\n "constants": {json.dumps(constants)},\n "records": {{\n' + ",\n".join(named) + "\n }\n}\n"


def check_golden(golden: Path, text: str, twins: str) -> None:
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"SGPU_UPDATE_GOLDEN=1 rewrites it; then labextension/src/{twins}"


def test_the_golden_records_that_the_front_end_reads_are_what_python_writes() -> None:
    """`labextension/test/messages.test.ts` checks its twins of the records against this file."""
    names = ("VERSION", "MAX_LINES", "MAX_MATCHES", "MAX_LOG_BYTES")
    constants = {name: getattr(schema if hasattr(schema, name) else messages, name) for name in names}
    check_golden(GOLDEN, golden_text(constants, record_types(schema, messages)), "run_view/messages.ts")


def test_the_golden_records_that_the_panel_reads_are_what_python_writes() -> None:
    """`labextension/test/panel_messages.test.ts` checks its twins of the records against this file."""
    constants: dict[str, object] = {
        "VERSION": choice.VERSION,
        "MAX_RUNS": panel_schema.MAX_RUNS,
        "PANEL": panel_messages.PANEL,
        "CHOICE_KEY": choice.CHOICE_KEY,
    }
    kinds = record_types(panel_schema, choice, panel_messages)
    check_golden(PANEL_GOLDEN, golden_text(constants, kinds), "panel/messages.ts")


# ------------------------------------------------------------------ the built file


@pytest.mark.timeout(500)
def test_a_fresh_build_gives_the_committed_bytes(front_end: Path, tmp_path: Path) -> None:
    told = npm(front_end, "run", "build:view", "--", f"--outdir={tmp_path}")
    assert told.returncode == 0, told.stderr
    for name in MOST_BYTES:
        assert (tmp_path / name).read_bytes() == (STATIC / name).read_bytes(), f"{name} is older: npm run build:view"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MOST_BYTES)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("test", marks=pytest.mark.slow),
        pytest.param("check", marks=pytest.mark.slow),
        pytest.param("lint", marks=pytest.mark.slow),
    ],
)
def test_the_sources_pass_their_checks(front_end: Path, script: str) -> None:
    told = npm(front_end, "run", script)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("name", MOST_BYTES)
def test_a_built_view_is_one_small_file_without_a_map(name: str) -> None:
    text = (STATIC / name).read_text()
    assert len(text.encode()) < MOST_BYTES[name]
    assert "sourceMappingURL" not in text
    assert "import(" not in text
    assert str(ROOT) not in text


def test_the_lock_file_names_no_host() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    assert not [name for name, entry in packages.items() if "resolved" in entry]
