"""What the system names need not be UTF-8: paths, environment variables, users, hosts.

Python decodes such bytes to lone surrogates, for which `text.encode()` raises. So the packages that handle names of
the system say how they encode: with `os.fsencode`, or with the encoding's name where a text can be no such name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "sgpu_magic"
PACKAGES = ["client", "packages", "files", "system", "agent", "nodes", "config", "worker/process"]
# receivers without system names: digests, keys in base 85, JSON, texts of the package itself
_PLAIN = ("hexdigest", "json", "dumps", "base64", "secret", "public", "server_key", "key", "text", "new", "data")


def bare(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each `text.encode()` without an explicit encoding."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="encode"), args=[], keywords=[]):
                if not _is_plain(value):
                    yield node.lineno


def _is_plain(value: ast.expr) -> bool:
    """Whether a text contains no system names: judged by its last name, a `str()` call or a constant."""
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)):
            return name in _PLAIN
        case ast.Call(func=ast.Name(id="str")) | ast.Constant():
            return True
    return False


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (PACKAGE / package).rglob("*.py")


@pytest.mark.parametrize("path", list(modules()), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_of_the_system_are_encoded_as_such(path: Path):
    lines = list(bare(ast.parse(path.read_text())))
    assert not lines, f"{path.relative_to(PACKAGE)}, lines {lines}: os.fsencode, or say the encoding"


def test_the_rule_finds_what_it_is_for():
    text = "digest.update(part.encode() + b'')\nf'{sys.prefix}'.encode()\nos.fsencode(a)\nname.encode('ascii')"
    assert sorted(bare(ast.parse(text))) == [1, 2]
