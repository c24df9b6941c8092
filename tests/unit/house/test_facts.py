"""No code reads what another part wrote for people: facts travel as data, and are worded where they are shown."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "sgpu_magic").rglob("*.py"))
_TEXTS = ("message", "reason", "sentence", "sentences", "evalue", "traceback")
"""Names of what was written for people."""
_PATTERNS = ("match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split")
_EDITS = (
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "find",
    "index",
    "replace",
    "partition",
    "rpartition",
)
ALLOWED = {
    # a message of the browser: a record, not a text
    "panel/kernel_endpoint.py": 1,
    # the user asks for the help page of an error by its name
    "views/help/__init__.py": 1,
    # what exceptions of torch, CUDA and Python say, which have no other form
    "views/remote_error.py": 4,
    "worker/cell/diagnosis.py": 1,
    # whether a user's exception repeats the name of its type
    "views/run_notes.py": 1,
}
"""Places by module where such a text is read, with the reason."""


def read_texts(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each place that looks into a text for people, or that takes a class of `errors` by its name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="errors"), *_]):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _EDITS and _is_text(value):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=attr), args=args) if attr in _PATTERNS and any(map(_is_text, args)):
                yield node.lineno
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]) if _is_text(text):
                yield node.lineno


def _is_text(node: ast.expr) -> bool:
    """Whether this is a text for people, or a part of one."""
    match node:
        case ast.Attribute(attr=attr):
            return attr in _TEXTS
        case ast.Name(id=name):
            return name in _TEXTS
        case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value)):
            return _is_text(value)
    return False


def test_no_module_reads_a_text_for_people():
    found = {
        path.relative_to(ROOT / "sgpu_magic").as_posix(): len(lines)
        for path in MODULES
        if (lines := list(read_texts(ast.parse(path.read_text()))))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "if error.message.startswith('no'): pass",
        "run.reason.strip().removesuffix('.')",
        "_WORDS.sub('gpus', error.message)",
        "re.search('lost', failure.message[:400])",
        "'--gpus' in error.message",
        "message = message.replace('--gpus', 'gpus')",
        "_OURS.match(traceback[-1])",
        "getattr(errors, refused.error)(refused.message)",
    ],
)
def test_a_text_that_is_read_is_found(code: str):
    assert list(read_texts(ast.parse(code))) == [1]


@pytest.mark.parametrize(
    "code", ["error.text", "f'{error.message}.'", "name.startswith('no')", "getattr(record, 'at')"]
)
def test_a_text_that_is_shown_is_not_found(code: str):
    assert list(read_texts(ast.parse(code))) == []
