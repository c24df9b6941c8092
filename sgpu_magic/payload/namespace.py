"""The global names that code reads, the user's names in a notebook, and the selection of what is shipped.

Also finds the source of the cells that defined the shipped functions.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import linecache
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType

from sgpu_magic.errors import UsageError
from sgpu_magic.suggestions import did_you_mean
from sgpu_magic.wire.option_text import OptionName, text_of

# methods of `get_ipython()` that IPython's transform calls, and how many of their leading strings are not code
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
    """Whether `name` in the notebook belongs to IPython, or is just the builtin of that name."""
    if _IPYTHON_NAME.fullmatch(name):
        return True
    if name in _IPYTHON_HELPERS:
        module = str(getattr(value, "__module__", "") or type(value).__module__)
        return module.partition(".")[0] in ("IPython", "ipykernel", "io", "_io", "_sitebuiltins")
    return value is not None and getattr(builtins, name, None) is value


def only_in_notebook(value: object) -> str:
    """Return why an object is of use in the notebook's own process only; "" if it is not such an object.

    The class of such an object says so in its attribute `only_in_notebook`, a sentence.
    """
    found = (vars(kind).get("only_in_notebook") for kind in type(value).__mro__)
    return next((text for text in found if isinstance(text, str)), "")


def bound_cells(function: FunctionType) -> Iterator[tuple[int, object]]:
    """Yield the index and the content of each cell in a function's closure that is bound already."""
    for index, cell in enumerate(function.__closure__ or ()):
        with contextlib.suppress(ValueError):
            yield index, cell.cell_contents


def loaded_names(code: CodeType) -> dict[str, None]:
    """Return the global names that `code` and the code nested in it read, in order of appearance.

    A name that the same code object binds earlier, before any jump, does not count as read.
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
    """Parse a cell (top-level await allowed) without warnings; those appear when the cell runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, filename)


def compile_quietly(source: str | ast.Module, filename: str, *, flags: int = 0) -> CodeType:
    """Compile as IPython compiles a cell (top-level await allowed), without warnings.

    Args:
        source: The source text or its tree.
        filename: The file name for errors.
        flags: `__future__` flags.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(source, filename, "exec", flags=flags | _ALLOWED, dont_inherit=True)


# ---------------------------------------------------------------- what to ship


def collect(
    names: Iterable[str], user_ns: Mapping[str, object], *, extra: Iterable[str] = (), exclude: Iterable[str] = ()
) -> dict[str, object]:
    """Return the objects to ship, by name, in the order in which the notebook defined them.

    Args:
        names: Names that the cell reads; undefined names, IPython's own and builtins are skipped.
        user_ns: The notebook's namespace.
        extra: Names given by `--in`; always shipped.
        exclude: Names given by `--exclude`.

    Raises:
        UsageError: A name of `extra` is undefined, or is excluded as well.
    """
    asked, excluded = frozenset(extra), frozenset(exclude)
    for name in sorted(asked):
        if name not in user_ns:
            raise UsageError(
                text_of(f"the notebook has no `{name}`, which ", OptionName("in"), f" names. {_near(name, user_ns)}")
            )
        if name in excluded:
            raise UsageError(
                text_of(
                    f"`{name}` is in both ",
                    OptionName("in"),
                    " and ",
                    OptionName("exclude"),
                    ". Remove it from one of them.",
                )
            )
    wanted = {name for name in names if name not in excluded and name in user_ns} | asked
    found: dict[str, object] = {}
    for name, value in user_ns.items() if wanted else ():
        if name in wanted:
            wanted.discard(name)
            if name in asked or not is_ipythons(name, value):
                found[name] = value
            if not wanted:
                # a long notebook has thousands of further names, most of them IPython's
                break
    return found


def _near(name: str, user_ns: Mapping[str, object]) -> str:
    own = [known for known, value in user_ns.items() if not is_ipythons(known, value)]
    return did_you_mean(name, own, most=3) or "Define it in an earlier cell or remove it from --in."


def submodules_read(code_names: Iterable[str], values: Iterable[object]) -> tuple[str, ...]:
    """Return the loaded submodules that code reaches through a shipped package, such as `xml.etree`.

    A package is shipped by reference; its submodule is only available on the rank if it is imported too.

    Args:
        code_names: Every identifier in the cell.
        values: The shipped objects.
    """
    words = frozenset(code_names)
    packages = [v.__name__ for v in values if isinstance(v, ModuleType) and hasattr(v, "__path__")]
    return tuple(
        module
        for package in packages
        for module in list(sys.modules)
        if module.startswith(package + ".") and words.issuperset(module[len(package) + 1 :].split("."))
    )


def cell_sources(
    files: Iterable[str], execution_counts: Mapping[str, int] | None = None
) -> tuple[tuple[str, str, int | None], ...]:
    """Return (file name, source, execution count) of the cells that defined the shipped functions.

    Args:
        files: File names of code objects (`Packed.files`); real files are skipped.
        execution_counts: Cell number by file name, `shell.compile._filename_map` in IPython.
    """
    counts = execution_counts or {}
    entries = ((file, linecache.cache.get(file)) for file in dict.fromkeys(files))
    return tuple(
        (file, "".join(entry[2]), counts.get(file))
        for file, entry in entries
        # an entry with an mtime is a real file, which the rank can read itself
        if entry is not None and len(entry) == 4 and entry[1] is None
    )
