"""Rules of style that no linter has, such as no arithmetic with booleans and constants on top."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_TESTS = [path for path in (ROOT / "tests").rglob("*.py") if "benchmarks" not in path.parts]
MODULES = sorted([*(ROOT / "sgpu_magic").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
# an argument in a docstring's section
_DESCRIBED = re.compile(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", re.MULTILINE)
_CLOCKS = ("monotonic", "perf_counter")
_BOOLEAN_CALLS = ("all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass")


def nested_conditionals(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each conditional expression that is the condition or a branch of another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            for part in (node.test, node.body, node.orelse):
                if isinstance(part, ast.IfExp):
                    yield part.lineno


def boolean_products(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each text or list that is multiplied by a condition, as in `"s" * (count != 1)`."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if (_is_sequence(left) and _is_condition(right)) or (
                _is_sequence(right) and _is_condition(left)
            ):
                yield node.lineno


def _is_sequence(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)


def _is_condition(node: ast.expr) -> bool:
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _BOOLEAN_CALLS
    return False


def late_constants(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each constant below the first function or class that uses none of them."""
    defined: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                used = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
                if used & defined:
                    # a later constant may be made from this one
                    defined.add(name)
                elif defined and _CONSTANT.fullmatch(name):
                    yield node.lineno


def unknown_arguments(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each function or class whose docstring describes an argument that it does not have.

    Classes with a base are left out, since they may take the base's arguments.
    """
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                known = _arguments(args)
            case ast.ClassDef(bases=[] | [ast.Name(id="NamedTuple")], body=body):
                known: set[str] = set()
                for part in body:
                    match part:
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            known.add(name)
                        case ast.FunctionDef(name="__init__", args=args):
                            known |= _arguments(args)
                        case _:
                            pass
            case _:
                continue
        if _described(node, "Args") - known:
            yield node.lineno


def unknown_attributes(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each class whose docstring describes an attribute that its body never sets or defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (described := _described(node, "Attributes")):
            known: set[str] = set()
            for part in ast.walk(node):
                match part:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        known.add(name)
                    case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                        known.add(name)
                    case _:
                        pass
            if described - known:
                yield node.lineno


def _described(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, section: str) -> set[str]:
    _, found, text = (ast.get_docstring(node) or "").partition(f"{section}:\n")
    return set(_DESCRIBED.findall(text.split("\n\n")[0])) if found else set()


def _arguments(args: ast.arguments) -> set[str]:
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {each.arg for each in every if each is not None}


def tight_time_limits(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each assertion that something takes less than 2 s, which a slow machine breaks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for compared in ast.walk(node.test):
                if isinstance(compared, ast.Compare) and _has_tight_limit(compared):
                    yield node.lineno


def _has_tight_limit(compared: ast.Compare) -> bool:
    operands = [compared.left, *compared.comparators]
    return any(
        isinstance(operator, ast.Lt | ast.LtE) and _is_elapsed_time(left) and _seconds(right) < 2
        for left, operator, right in zip(operands, compared.ops, operands[1:], strict=False)
    )


def _is_elapsed_time(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr in (*_CLOCKS, "seconds") for part in ast.walk(node))


def _seconds(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _seconds(left) + _seconds(right)
        case _:
            return float("inf")


Rule = Callable[[ast.Module], Iterator[int]]
CODE_RULES: tuple[Rule, ...] = (
    nested_conditionals,
    boolean_products,
    late_constants,
    unknown_arguments,
    unknown_attributes,
)
RULES = {rule.__name__: rule for rule in (*CODE_RULES, tight_time_limits)}


def test_no_module_breaks_a_rule():
    found: dict[str, dict[str, list[int]]] = {}
    for path in MODULES:
        # parsed once for all rules: parsing takes most of the time
        tree = ast.parse(path.read_text())
        for rule in CODE_RULES:
            if lines := list(rule(tree)):
                found.setdefault(rule.__name__, {})[str(path.relative_to(ROOT))] = lines
    assert found == {}


def test_no_test_limits_time_to_what_a_slow_machine_exceeds():
    texts = {path: path.read_text() for path in _TESTS}
    timed = [path for path, text in texts.items() if any(word in text for word in (*_CLOCKS, ".seconds"))]
    found = {str(path.relative_to(ROOT)): list(tight_time_limits(ast.parse(texts[path]))) for path in timed}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("name", "code", "lines"),
    [
        ("nested_conditionals", "a = 1 if b else 2\nc = 1 if b else 2 if d else 3\ne = (1 if b else 2) + 1", [2]),
        ("boolean_products", "'s' * (n != 1)\n[a] * bool(b)\n'-' * n\n2 * (a > b)\n(not a) * 's'", [1, 2, 5]),
        (
            "unknown_arguments",
            'def f(a, *b):\n  """Do.\n\n  Args:\n      a: A.\n      b: B.\n  """\n'
            'class C:\n  """Be.\n\n  Args:\n      a: A.\n      b: B.\n  """\n  def __init__(self, a): ...',
            [8],
        ),
        (
            "unknown_attributes",
            'class C:\n  """Be.\n\n  Attributes:\n      a: A.\n      b: B.\n  """\n  def __init__(self): self.a = 1\n'
            'class D:\n  """Be.\n\n  Attributes:\n      a: A.\n      b: B.\n  """\n  a = 1\n  def b(self): ...',
            [1],
        ),
        (
            "tight_time_limits",
            "assert time.monotonic() - a < 1.5\nassert reply.seconds <= 0.4 + 1\nassert 1 < time.monotonic() - a < 3\n"
            "assert reply.seconds < 0.4 + GRACE_S\nassert time.thread_time() - a < 0.1",
            [1, 2],
        ),
        ("late_constants", "A = 1\ndef f(): ...\nB = 2\nC = f()\nD = C + 1\n_e = 3\nT = list[int]", [3, 7]),
    ],
)
def test_a_rule_finds_what_it_is_for(name: str, code: str, lines: list[int]):
    assert list(RULES[name](ast.parse(code))) == lines
