"""The global names that a cell reads and those that it may bind.

They are found in compiled code objects, after IPython's transform of magics and `!`, statement by statement:
a name that an earlier statement certainly binds is the cell's own. If that is not certain, the name counts
as read: shipping too much costs time, shipping too little is an error on the rank.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType

import msgspec

from sgpu_magic.payload.namespace import MAGIC_CALLS, compile_quietly, loaded_names, parse_quietly

_OWN_MAGIC = re.compile(r"%%(distributed|rank|sgpu\w*)\b")
FUTURE_FLAGS = functools.reduce(
    int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
# a cell that calls one of these may bind any name
_BINDERS = frozenset({"exec", "eval", "globals", "locals", "vars", "run_path", "run_module"})
# comprehensions, which before Python 3.12 have code objects of their own
_AT_ONCE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
# magics that bind only names in their text
_PLAIN_MAGICS = frozenset(
    (
        "time", "timeit", "prun", "lprun", "mprun", "memit", "capture", "matplotlib", "pip",
        "conda", "cd", "env", "set_env", "pwd", "ls", "who", "whos", "config", "autoreload",
        "load_ext", "reload_ext", "pdb", "debug", "xmode", "precision", "sx", "system", "bash",
        "sh", "html", "latex", "javascript", "js", "svg", "markdown", "writefile",
    )
)  # fmt: skip


class CellNames(msgspec.Struct, frozen=True):
    """Global names in a cell.

    Args:
        read: Names that it reads.
        stored: Names that it may bind; None if that is unknown: it calls `exec` or `globals`, imports `*`, or uses a
            magic that may bind names.
        deleted: Names that it may delete at its top level and does not certainly bind again.
        later: Names that the functions which it defines read when they are called, perhaps by a later cell.
        imported: Names that it binds by imports.
    """

    read: frozenset[str]
    stored: frozenset[str] | None
    deleted: frozenset[str]
    later: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()


def names_in(source: str, *, transform: Callable[[str], str] | None = None) -> CellNames:
    """Return the global names in a cell.

    Args:
        source: The cell with its first line; `%%distributed` and blank lines count only for line numbers.
        transform: IPython's `transform_cell`; the default one if omitted.

    Raises:
        SyntaxError: The cell does not compile; line numbers are those of `source`.
    """
    tree, code = _parse(source, transform)
    reader = _Reader(code)
    bound = reader.block(tree.body, frozenset())
    steps = dis.get_instructions(code)
    deleted = frozenset(str(step.argval) for step in steps if step.opname == "DELETE_NAME")
    return CellNames(
        read=frozenset(reader.read),
        stored=_stored(tree, code),
        deleted=deleted - bound,
        later=frozenset(_read_later(code)),
        imported=frozenset(
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ),
    )


def _read_later(code: CodeType) -> set[str]:
    """Return the global names that functions defined by `code` read, not those that it reads itself."""
    names: set[str] = set()
    for nested in code.co_consts:
        if not isinstance(nested, CodeType):
            continue
        is_class_body = not nested.co_flags & inspect.CO_OPTIMIZED
        names.update(_read_later(nested) if is_class_body or nested.co_name in _AT_ONCE else loaded_names(nested))
    return names


def _stored(tree: ast.Module, code: CodeType) -> frozenset[str] | None:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return None
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name in _BINDERS:
                    return None
                case ast.Attribute(attr=name) if name in MAGIC_CALLS and name.startswith("run_"):
                    words = [
                        arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                    ]
                    if not words or words[0] not in _PLAIN_MAGICS:
                        return None
                    names.update(word for text in words[1:] for word in re.findall(r"[^\W\d]\w*", text))
                case _:
                    pass
    return frozenset(names | stored_names(code, top=True))


def names_bound(source: str, *, transform: Callable[[str], str] | None = None) -> frozenset[str]:
    """Return the names that are certainly bound once the cell has run to its end.

    Args:
        source: As for `names_in`.
        transform: As for `names_in`.

    Raises:
        SyntaxError: The cell does not compile.
    """
    tree, code = _parse(source, transform)
    return _Reader(code).block(tree.body, frozenset())


def strings_in(source: str) -> Iterator[str]:
    """Yield the strings that stand in a cell, without the pieces of f-strings; none if it does not compile.

    Args:
        source: As for `names_in`.
    """
    with contextlib.suppress(SyntaxError):
        nodes = list(ast.walk(_parse(source, None)[0]))
        pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
                yield node.value


def stored_names(code: CodeType, *, top: bool) -> set[str]:
    """Return the global names that code and its nested code set.

    Args:
        code: The code.
        top: The code is a cell's top level, where every name is global.
    """
    wanted = ("STORE_NAME", "STORE_GLOBAL") if top else ("STORE_GLOBAL",)
    names: set[str] = {step.argval for step in dis.get_instructions(code) if step.opname in wanted}
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*(stored_names(each, top=False) for each in nested))


def _parse(source: str, transform: Callable[[str], str] | None) -> tuple[ast.Module, CodeType]:
    """Return the transformed cell as a tree with its own line numbers, and its code."""
    lines = source.splitlines(keepends=True)
    skipped = 0
    while skipped < len(lines) and (not lines[skipped].strip() or (skipped == 0 and _OWN_MAGIC.match(lines[0]))):
        skipped += 1
    # the transform drops leading blank lines, so they are put back after it
    try:
        transformed = (transform or _stock_transform())("".join(lines[skipped:]))
    except SyntaxError as error:
        # an indentation error of the tokenizer
        error.lineno = (error.lineno or 1) + skipped
        raise
    text = "\n" * skipped + transformed
    tree = parse_quietly(text, "<cell>")
    return tree, compile_quietly(tree, "<cell>")


@functools.cache
def _stock_transform() -> Callable[[str], str]:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell


class _Reader:
    """Walks blocks of statements with the set of names that are certainly bound so far.

    Args:
        code: The cell's code, for its `__future__` flags.
    """

    def __init__(self, code: CodeType) -> None:
        self._flags = code.co_flags & FUTURE_FLAGS
        self.read: set[str] = set()

    def block(self, body: Iterable[ast.stmt], bound: frozenset[str]) -> frozenset[str]:
        """Add the names that `body` reads; return those certainly bound after it."""
        for statement in body:
            bound = self._statement(statement, bound)
        return bound

    def _statement(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        match node:
            case ast.If():
                self._expressions([node.test], bound)
                return self.block(node.body, bound) & self.block(node.orelse, bound)
            case ast.While(test=head) | ast.For(iter=head) | ast.AsyncFor(iter=head):
                self._expressions([head], bound)
                inside = bound if isinstance(node, ast.While) else self._target(node.target, bound)
                self.block(node.body, inside)
                self.block(node.orelse, bound)
                return bound
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expressions([item.context_expr], bound)
                    if item.optional_vars is not None:
                        bound = self._target(item.optional_vars, bound)
                self.block(node.body, bound)  # an exception that the manager suppresses may end it early
                return bound
            case ast.Try() | ast.TryStar():
                return self._try(node, bound)
            case ast.Match():
                self._expressions([node.subject], bound)
                for case in node.cases:
                    inside = bound | _captured(case.pattern)
                    self._expressions([n for n in ast.walk(case.pattern) if isinstance(n, ast.expr)], bound)
                    self._expressions([case.guard] if case.guard else [], inside)
                    self.block(case.body, inside)
                return bound
            case ast.Delete():
                self._code([node], bound)
                return bound - _targets(node.targets)
            case ast.Pass() | ast.Break() | ast.Continue():
                return bound
            case _:
                return self._simple(node, bound)

    def _try(self, node: ast.Try | ast.TryStar, bound: frozenset[str]) -> frozenset[str]:
        after = self.block(node.orelse, self.block(node.body, bound))
        for handler in node.handlers:
            self._expressions([handler.type] if handler.type else [], bound)
            name = frozenset({handler.name} if handler.name else ())
            after &= self.block(handler.body, bound | name) - name
        return after | self.block(node.finalbody, bound)

    def _simple(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str]:
        match node:
            case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
                # its body can't run before the name is bound
                self._code([node], bound | {node.name})
                # unless its defaults or annotations name an earlier object of the same name
                if any(isinstance(part, ast.Name) and part.id == node.name for part in ast.walk(node.args)):
                    self.read.add(node.name)
                return bound | {node.name}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                new = frozenset({node.name})
            case ast.Assign():
                new = _targets(node.targets)
            case ast.AnnAssign(value=ast.expr()) | ast.AugAssign():
                new = _targets([node.target])
            case ast.Import() | ast.ImportFrom():
                new = frozenset((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
            case _:
                new = frozenset[str]()
        self._code([node], bound)
        return bound | new

    def _target(self, target: ast.expr, bound: frozenset[str]) -> frozenset[str]:
        """Add the names that storing into `target` reads (`a[i]`, `a.b`); return `bound` with the names it binds."""
        if not isinstance(target, ast.Name):
            reads = [n for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
            self.read.update({n.id for n in reads} - bound)
        return bound | _targets([target])

    def _expressions(self, expressions: Iterable[ast.expr], bound: frozenset[str]) -> None:
        self._code([ast.copy_location(ast.Expr(value=expression), expression) for expression in expressions], bound)

    def _code(self, statements: list[ast.stmt], bound: frozenset[str]) -> None:
        if statements:
            code = compile_quietly(ast.Module(statements, type_ignores=[]), "<cell>", flags=self._flags)
            self.read.update(loaded_names(code).keys() - bound)


def _targets(targets: Iterable[ast.expr]) -> frozenset[str]:
    """Names bound by assignment targets, through tuples, lists and stars."""
    return frozenset(
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )


def _captured(pattern: ast.pattern) -> frozenset[str]:
    names = (getattr(node, "name", None) or getattr(node, "rest", None) for node in ast.walk(pattern))
    return frozenset(name for name in names if isinstance(name, str))
