# ruff: noqa: T201
"""Generate the TypeScript declarations of the records that Python and the browser exchange.

    python scripts/front_end_records.py [--check]

Each `msgspec` record becomes a declaration with the functions of `labextension/src/shared/checks.ts`, which is a
TypeScript type and a check at run time. Literals, tuples of three and four, unions of records and constants are
generated too.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.panel import kernel_state, orders
from sgpu_magic.panel import schema as panel_schema
from sgpu_magic.runs.choice import schema as choice
from sgpu_magic.server import page_schema
from sgpu_magic.views.live import messages as live_messages
from sgpu_magic.views.live import schema as live_schema

SOURCES = Path(__file__).resolve().parents[1] / "labextension" / "src"
FILES = {
    SOURCES / "run_view" / "records.ts": (live_schema, live_messages),
    SOURCES / "run_page" / "records.ts": (page_schema,),
    SOURCES / "panel" / "records.ts": (choice, panel_schema, kernel_state, orders),
}
_SCALARS: dict[object, str] = {int: "num", float: "num", str: "str", bool: "bool"}
_CHECKS = ("bool", "either", "kinds", "list", "nullable", "num", "oneOf", "quadruple", "record", "str", "triple")
_WIDTH = 120
_ROWS = {3: "triple", 4: "quadruple"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the front end's half of the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not what Python has")
    checks: bool = parser.parse_args().check
    texts = {path: text_of(modules) for path, modules in FILES.items()}
    old = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if checks:
            print(f"{path.relative_to(SOURCES.parents[1])} is older than its Python: `make front-end` writes it anew")
        else:
            path.write_text(texts[path])
    return 1 if checks and old else 0


def text_of(modules: Sequence[types.ModuleType]) -> str:
    """Return the TypeScript file of these modules' records, in the order of their definitions in Python."""
    body = "\n".join(Declarations(modules).lines()).strip()
    used = [name for name in _CHECKS if re.search(rf"\b{name}\b(?!:)", body)]
    names = "\n".join(f" * - `{module.__name__}`" for module in modules)
    return f"""\
/**
 * Types and checks of the records in these modules, which document them:
 *
{names}
 *
 * Written by `scripts/front_end_records.py`.
 */

import {{ {", ".join(used)} }} from "../shared/checks";
import type {{ Of }} from "../shared/checks";

{body}
"""


class Declarations:
    """The TypeScript declarations of modules' public names.

    Args:
        modules: The modules, each after those whose records it uses.
    """

    def __init__(self, modules: Sequence[types.ModuleType]) -> None:
        owned = {module.__name__ for module in modules}
        self._names: dict[str, Any] = {}
        for module in modules:
            assigned = _assigned(module)
            for name, value in vars(module).items():
                if name[0] != "_" and (
                    _is_alias(value) or getattr(value, "__module__", "") in owned or name in assigned
                ):
                    self._names[name] = value
        self._aliases = {value: name for name, value in self._names.items() if _is_alias(value)}

    def lines(self) -> Iterator[str]:
        for name, value in self._names.items():
            if _is_constant(name):
                yield f"\nexport const {name} = {json.dumps(value)};"
            elif _is_alias(value):
                yield from self._declared(name, self._check(value, alias=False))
            elif _is_record(value):
                yield from self._declared(name, self._record(value))

    def _declared(self, name: str, check: str) -> Iterator[str]:
        declared = name[0].lower() + name[1:]
        yield f"\nexport const {declared} = {check};"
        yield f"export type {name} = Of<typeof {declared}>;"

    def _record(self, record: type[msgspec.Struct]) -> str:
        config = record.__struct_config__
        fields = [f"{config.tag_field}: oneOf({json.dumps(config.tag)})"] if config.tag_field else []
        hints = typing.get_type_hints(record)
        for name in record.__struct_fields__:
            assert name != "id", "ipykernel 7.4.0 leaks memory for messages that have such a key"
            check = self._check(hints[name])
            fields.append(_entry(name, check))
        line = f"record({{ {', '.join(fields)} }})"
        return line if len(line) < _WIDTH - 40 else "record({\n  " + ",\n  ".join(fields) + ",\n})"

    def _check(self, hint: Any, *, alias: bool = True) -> str:
        if hint in _SCALARS:
            return _SCALARS[hint]
        if alias and hint in self._aliases:
            hint_name = self._aliases[hint]
            return hint_name[0].lower() + hint_name[1:]
        if _is_record(hint):
            return hint.__name__[0].lower() + hint.__name__[1:]
        arguments = typing.get_args(hint)
        match typing.get_origin(hint):
            case typing.Literal:
                return f"oneOf({', '.join(map(json.dumps, arguments))})"
            case types.UnionType | typing.Union if type(None) in arguments:
                (other,) = (each for each in arguments if each is not type(None))
                return f"nullable({self._check(other)})"
            case types.UnionType | typing.Union if all(map(_is_record, arguments)):
                tags = [_entry(each.__struct_config__.tag, self._check(each)) for each in arguments]
                return "kinds({\n  " + ",\n  ".join(tags) + ",\n})"
            case types.UnionType | typing.Union:
                first, second = map(self._check, arguments)
                return f"either({first}, {second})"
            case origin if origin is tuple and arguments[-1] is ...:
                return f"list({self._check(arguments[0])})"
            case origin if origin is tuple and len(arguments) in _ROWS:
                return f"{_ROWS[len(arguments)]}({', '.join(map(self._check, arguments))})"
            case _:
                raise TypeError(f"TypeScript has nothing for {hint}")


def _entry(key: str, value: str) -> str:
    return value if key == value else f"{key if key.isidentifier() else json.dumps(key)}: {value}"


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, live_schema.Message)
        and bool(value.__struct_fields__ or value.__struct_config__.tag)
    )


def _is_alias(value: Any) -> bool:
    return typing.get_origin(value) in (typing.Literal, tuple, types.UnionType, typing.Union)


def _assigned(module: types.ModuleType) -> set[str]:
    """Return the constants that the module itself defines, without imported ones."""
    body = ast.parse(inspect.getsource(module)).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name) and _is_constant(target.id)}


def _is_constant(name: str) -> bool:
    return name.isupper()


if __name__ == "__main__":
    raise SystemExit(main())
