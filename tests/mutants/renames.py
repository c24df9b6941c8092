"""`make renames`: renames private methods of a package in a copy of the tree and runs tests there, which should pass.

    python -m tests.mutants.renames                      ten methods of the agent, other ones each time
    python -m tests.mutants.renames --seed 7             the same ones each time
    python -m tests.mutants.renames --count 1000         all of them
    python -m tests.mutants.renames --package sgpu_magic.pool tests/unit/pool tests/unit/house/test_mutants.py

A test that fails depends on a private name. The exit status is 1 when one does.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.mutants.__main__ import PACKAGE, Tree, Verdict

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OF_AGENT = ("tests/unit/agent", "tests/faults/test_agent_faults.py", "tests/unit/house/test_mutants.py")
_LIMIT_S = 1800.0
_PREFIX = "_renamed"


def private_methods(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of private methods that modules define."""
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    methods = (node.name for each in classes for node in each.body if isinstance(node, _FUNCTIONS))
    return {name for name in methods if name.startswith("_") and not name.endswith("_")}


def other_names(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Yield names that modules use for something other than a method: functions, variables, arguments and texts."""
    for tree in trees:
        yield from (node.name for node in tree.body if isinstance(node, _FUNCTIONS))
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                    yield name
                case ast.keyword(arg=str(name)):
                    yield name


class Renaming(ast.NodeTransformer):
    """Renames methods, where they are defined and where they are used.

    Args:
        names: The new name of each.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self._names.get(node.name, node.name)
        self.generic_visit(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        node.name = self._names.get(node.name, node.name)
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        node.attr = self._names.get(node.attr, node.attr)
        self.generic_visit(node)
        return node


def rename_methods(folder: Path, count: int, seed: int) -> list[str]:
    """Rename private methods of a package in its modules, the only ones that use them; return their names.

    Args:
        folder: The package's folder.
        count: The most methods to rename.
        seed: Chooses them.
    """
    trees = {file: ast.parse(file.read_text()) for file in folder.rglob("*.py")}
    names = sorted(private_methods(trees.values()).difference(other_names(trees.values())))
    chosen = sorted(random.Random(seed).sample(names, min(count, len(names))))
    renaming = Renaming({name: f"{_PREFIX}{name}" for name in chosen})
    for file, tree in trees.items():
        file.write_text(ast.unparse(renaming.visit(tree)))
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Rename methods and run the tests; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.renames", description="Rename private methods and see which tests fail."
    )
    parser.add_argument("tests", nargs="*", default=_OF_AGENT, help="test files and folders; by default the agent's")
    parser.add_argument("--package", default=f"{PACKAGE}.agent", help="defines the methods (default: the agent)")
    parser.add_argument("--count", type=int, default=10, help="how many methods (default: 10)")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="chooses them (default: random)")
    options = parser.parse_args(arguments)
    with Tree() as tree:
        names = rename_methods(tree.path.joinpath(*options.package.split(".")), options.count, options.seed)
        if not names:
            parser.error(f"{options.package} has no private methods to rename")
        print(f"renamed with --seed {options.seed}: {', '.join(names)}", flush=True)
        outcome = tree.run_tests(options.tests, ("-m", "not slow"), _LIMIT_S)
    if outcome.verdict is Verdict.NOT_CAUGHT:
        print(f"all tests pass, in {outcome.seconds:.0f} s")
        return 0
    print(outcome.output)
    print(f"the tests do not pass: {outcome.by}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
