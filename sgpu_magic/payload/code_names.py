"""Which global names a code object reads, and which names in a notebook are IPython's, not the user's."""

from __future__ import annotations

import ast
import builtins
import dis
import re
import warnings
from collections.abc import Iterator
from types import CodeType

# attributes of `get_ipython()` that IPython's transform calls, and how many leading strings are no code
MAGIC_CALLS = {"run_line_magic": 1, "run_cell_magic": 1, "system": 0, "getoutput": 0, "getoutput_or_list": 0}
_ALLOWED = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SHELL_CALLS = frozenset({"system", "getoutput"})
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"})
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_SHELL_EXPRESSION = re.compile(r"(?<!\{)\{([^{}]+)\}|\$\{?([^\W\d]\w*)")
_QUERY_NAME = re.compile(r"@([^\W\d]\w*)")
_IPYTHON_NAME = re.compile(
    r"_{1,3}|_i{1,3}|_i?\d+|_[iod]h|In|Out|get_ipython|_exit_code|_dh"
    r"|__(name|doc|package|loader|spec|file|builtins?|annotations|session|vsc_ipynb_file)__"
)
_IPYTHON_HELPERS = frozenset({"exit", "quit", "open", "display"})


def is_ipythons(name: str, value: object) -> bool:
    """Tell whether `name` in the notebook is IPython's own, or nothing but the builtin of that name."""
    if _IPYTHON_NAME.fullmatch(name):
        return True
    if name in _IPYTHON_HELPERS:
        module = str(getattr(value, "__module__", "") or type(value).__module__)
        return module.partition(".")[0] in ("IPython", "ipykernel", "io", "_io", "_sitebuiltins")
    return value is not None and getattr(builtins, name, None) is value


def loaded_names(code: CodeType) -> dict[str, None]:
    """Return the global names that `code` and the code nested in it read, in order of appearance.

    A name that the same piece of code binds earlier, before any jump, is not read there.
    """
    names: dict[str, None] = {}
    _scan(code, names)
    return names


def _scan(code: CodeType, names: dict[str, None]) -> None:
    stored: set[str] = set()
    straight = True
    calls_magics = "get_ipython" in code.co_names
    texts_to_skip, is_shell, in_magic = 0, False, False
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            if step.argval not in stored:
                names[step.argval] = None
        elif step.opname in _STORES:
            if straight:
                stored.add(step.argval)
        elif step.opcode in _JUMPS:
            straight = False
        elif calls_magics and step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            in_magic = step.argval in MAGIC_CALLS
            texts_to_skip, is_shell = MAGIC_CALLS.get(step.argval, 0), step.argval in _SHELL_CALLS
        elif in_magic and step.opname.startswith("LOAD_CONST") and isinstance(step.argval, str):
            if texts_to_skip:
                texts_to_skip -= 1
            else:
                names.update(dict.fromkeys(_names_in_text(step.argval, is_shell=is_shell)))
        elif step.opname.startswith("CALL"):
            in_magic = False
    if "query" in code.co_names or "eval" in code.co_names:  # pandas reads the caller's variables as @name
        for text in code.co_consts:
            if isinstance(text, str):
                names.update(dict.fromkeys(_QUERY_NAME.findall(text)))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, names)


def _names_in_text(text: str, *, is_shell: bool) -> Iterator[str]:
    """Yield the names in a magic's text: code, a shell command with `{expression}` and `$name`, or words."""
    if is_shell:
        for expression, name in _SHELL_EXPRESSION.findall(text):
            yield from _IDENTIFIER.findall(expression) or [name]
        return
    try:
        code = compile_quietly(text, "<magic>")
    except (SyntaxError, ValueError):
        yield from _IDENTIFIER.findall(text)
    else:
        yield from loaded_names(code)


def parse_quietly(source: str, filename: str) -> ast.Module:
    """Parse as IPython does a cell (top-level await allowed), without warnings: the run gives those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = compile(source, filename, "exec", flags=ast.PyCF_ONLY_AST | _ALLOWED, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def compile_quietly(source: str | ast.Module, filename: str, *, flags: int = 0) -> CodeType:
    """Compile as IPython does a cell, as `parse_quietly` parses it.

    Args:
        source: Text or tree.
        filename: For errors.
        flags: `__future__` flags.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(source, filename, "exec", flags=flags | _ALLOWED, dont_inherit=True)
