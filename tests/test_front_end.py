"""The run's view in the browser: its records are Python's, and the built file is what the sources give."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from sgpu_magic.live import messages, picture

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "labextension"
BUILT = ROOT / "sgpu_magic" / "static" / "run_view.js"
GOLDEN = ROOT / "tests" / "golden" / "live_messages.json"
COPIED = ("package.json", "package-lock.json", ".npmrc", "*.mjs", "*.ts", "tsconfig*.json", "src", "test")
_NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENOTCACHED")


# ------------------------------------------------------------------ records


def record_types() -> list[type[picture.Message]]:
    return [
        kind
        for kind in {**vars(picture), **vars(messages)}.values()
        if isinstance(kind, type) and issubclass(kind, picture.Message) and kind is not picture.Message
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
    if isinstance(hint, type) and issubclass(hint, picture.Message):
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


def samples(cls: type[picture.Message]) -> list[picture.Message]:
    """Return records of a class: one, then one for each other choice of each of its fields."""
    sorts = {name: choices(hint) for name, hint in get_type_hints(cls).items() if name in cls.__struct_fields__}
    first = cls(**{name: values[0] for name, values in sorts.items()})
    changes = [{name: value} for name, values in sorts.items() for value in values[1:]]
    return [first, *(msgspec.structs.replace(first, **change) for change in changes)]


def test_the_golden_records_that_the_front_end_reads_are_what_python_writes() -> None:
    """`labextension/test/messages.test.ts` checks its twins of the records against this file."""
    constants = ("VERSION", "MAX_LINES", "MAX_MATCHES", "MAX_LOG_BYTES")
    written: dict[str, list[object]] = {}
    for cls in record_types():
        assert "id" not in cls.__struct_fields__
        written[cls.__name__] = [json.loads(messages.to_json(record)) for record in samples(cls)]
    bounds = json.dumps({name: getattr(picture if hasattr(picture, name) else messages, name) for name in constants})
    # a line for each sample, so that a change reads as what it is
    named = (
        f"  {json.dumps(name)}: [\n"
        + ",\n".join(f"   {json.dumps(sample, ensure_ascii=False)}" for sample in records)
        + "\n  ]"
        for name, records in written.items()
    )
    text = f'{{\n "constants": {bounds},\n "records": {{\n' + ",\n".join(named) + "\n }\n}\n"
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "SGPU_UPDATE_GOLDEN=1 rewrites it; then labextension/src/run_view/messages.ts"


# ------------------------------------------------------------------ the built file


@pytest.fixture(scope="session")
def front_end(pytestconfig: pytest.Config) -> Path:
    """A copy of the sources with the packages of the lock file, which are kept for the next time."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not on this machine: the built view is taken as committed")
    told = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if tuple(map(int, told.lstrip("v").split(".")[:2])) < (20, 19):
        pytest.skip(f"node {told} is older than 20.19, which the front end's tools need")
    lock = hashlib.sha256((SOURCES / "package-lock.json").read_bytes()).hexdigest()[:16]
    place = Path(pytestconfig.rootpath, ".pytest_cache", "front_end", lock)
    copy = place / "labextension"
    packages = copy / "node_modules"
    copy.mkdir(parents=True, exist_ok=True)
    for old in copy.iterdir():
        if old != packages:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for pattern in COPIED:
        for path in SOURCES.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / path.name)
    (place / "tests" / "golden").mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN, place / "tests" / "golden")
    installed = place / "installed"
    if not installed.exists():
        told = npm(copy, "ci", "--prefer-offline")
        if told.returncode and any(code in told.stderr for code in _NO_REGISTRY):
            pytest.skip("the front end's packages are not in npm's cache, and there is no registry")
        assert told.returncode == 0, told.stderr
        installed.touch()
    return copy


def npm(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["npm", *arguments], cwd=place, capture_output=True, text=True, timeout=400, env={**os.environ, "CI": "1"}
    )


@pytest.mark.timeout(500)
def test_a_fresh_build_gives_the_committed_bytes(front_end: Path, tmp_path: Path) -> None:
    told = npm(front_end, "run", "build:view", "--", f"--outfile={tmp_path / 'run_view.js'}")
    assert told.returncode == 0, told.stderr
    fresh = (tmp_path / "run_view.js").read_bytes()
    assert fresh == BUILT.read_bytes(), "the sources have changed: npm run build:view"


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "script", ["test", pytest.param("check", marks=pytest.mark.slow), pytest.param("lint", marks=pytest.mark.slow)]
)
def test_the_sources_pass_their_checks(front_end: Path, script: str) -> None:
    told = npm(front_end, "run", script)
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_built_view_is_one_small_file_without_a_map() -> None:
    text = BUILT.read_text()
    # every widget carries it to the page: with the table of an out-of-memory 67 kB, a third of that compressed
    assert len(text.encode()) < 70_000
    assert "sourceMappingURL" not in text
    assert "import(" not in text
    assert str(ROOT) not in text


def test_the_lock_file_names_no_host() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    assert not [name for name, entry in packages.items() if "resolved" in entry]
