"""Which names a cell reads and may bind, and which objects are shipped for them."""

# ruff: noqa: E501  a case stays on one line

from __future__ import annotations

import linecache
import subprocess
import sys
import types
import xml.etree.ElementTree  # noqa: F401  a submodule that is loaded
from textwrap import dedent

import pytest

from sgpu_magic.errors import UsageError
from sgpu_magic.payload.names import names_in
from sgpu_magic.payload.namespace import cell_sources, collect, submodules_read


def read(source: str) -> set[str]:
    """The names read, without builtins."""
    import builtins

    return {name for name in names_in(dedent(source)).read if not hasattr(builtins, name)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", set()),
        ("x = y", {"y"}),
        ("x = 1\nprint(x)", set()),
        ("x += 1", {"x"}),
        ("x[0] = y", {"x", "y"}),
        ("x.a = y", {"x", "y"}),
        ("a, (b, *c) = t\nprint(a, b, c)", {"t"}),
        ("if flag:\n    v = 1\nprint(v)", {"flag", "v"}),
        ("if flag:\n    v = 1\nelse:\n    v = 2\nprint(v)", {"flag"}),
        ("for i in xs:\n    print(i)", {"xs"}),
        ("for i in xs:\n    pass\nprint(i)", {"xs", "i"}),
        ("for a[k] in xs:\n    pass", {"a", "k", "xs"}),
        ("while go():\n    v = 1\nprint(v)", {"go", "v"}),
        ("while True:\n    n = step(n)\n    if n: break", {"step", "n"}),
        ("with lock as held:\n    held.use()", {"lock"}),
        ("with a as b, b.c as d:\n    r = d\nprint(r)", {"a", "r"}),
        ("try:\n    v = f()\nexcept E as e:\n    v = e\nprint(v)", {"f", "E"}),
        ("try:\n    v = f()\nexcept E:\n    pass\nprint(v)", {"f", "E", "v"}),
        ("try:\n    pass\nexcept E as e:\n    pass\nprint(e)", {"E", "e"}),
        ("try:\n    f()\nfinally:\n    v = 1\nprint(v)", {"f"}),
        ("import os\nos.getcwd()", set()),
        ("import a.b as c\nc.d(a)", {"a"}),
        ("from m import f as g\ng(f)", {"f"}),
        ("def f(a, b=d):\n    return a + cfg + f(a)\nf(1)", {"cfg", "d"}),
        ("def f(g=f):\n    return g\n", {"f"}),
        ("@deco\ndef f():\n    return f", {"deco", "f"}),
        ("def f():\n    global g\n    g = 1\n", set()),
        ("def f():\n    global g\n    g += 1\n", {"g"}),
        ("def f():\n    def g():\n        return deep\n    return g", {"deep"}),
        ("def f():\n    class A:\n        x = cfg\n    return A", {"cfg"}),
        (
            "class A(Base, metaclass=Meta):\n    x = 1\n    y = x + z\n    def m(self): return w",
            {"Base", "Meta", "z", "w"},
        ),
        ("lambda a: a + b", {"b"}),
        ("[i * k for i in xs for j in i if j]", {"k", "xs"}),
        ("{k: v for k, v in d.items()}", {"d"}),
        ("(n := 10) + n", set()),
        ("del x", {"x"}),
        ("x = 1\ndel x\nprint(x)", {"x"}),
        ("x: int = y", {"y"}),
        ("x: T", {"T"}),
        ("x: T\nprint(x)", {"T", "x"}),
        ("from __future__ import annotations\ndef f(a: T) -> T: ...", set()),
        ("def f(a: T) -> T: ...", {"T"}),
        ("await main()\nasync with a as b:\n    await b\nasync for c in d:\n    c", {"main", "a", "d"}),
        (
            "match p:\n    case Point(x=0, y=yy) if yy > lim:\n        print(yy)\n    case [a, *rest]:\n        print(rest)",
            {"p", "Point", "lim"},
        ),
        ("match p:\n    case K.v:\n        q = 1\nprint(q)", {"p", "K", "q"}),
        ('f"{x!r:>{w}}"', {"x", "w"}),
        ("assert ok, msg", {"ok", "msg"}),
        ("df.query('a > @limit')", {"df", "limit"}),
        ("print('@limit')", set()),
        # the output of IPython's transform
        ("%time x = f(y)", {"get_ipython", "f", "y"}),
        ("%timeit -n 3 f(y)", {"get_ipython", "f", "y", "n"}),
        ("r = %timeit -o f(y)", {"get_ipython", "f", "y", "o"}),
        ("!ls {folder} $name ${other} plain", {"get_ipython", "folder", "name", "other"}),
        ("files = !ls {folder + '/x'}\nfiles", {"get_ipython", "folder", "x"}),
        ("model?", {"get_ipython", "model"}),
        ("def g():\n    %time h(z)\n", {"get_ipython", "h", "z"}),
        ("%%time\nx = f(y)\nprint(x)", {"get_ipython", "f", "y"}),
        ("%%distributed --gpus 2 --out x\nx = f(y)", {"f", "y"}),
        ("%%distributed\n\n%%time\nf(y)", {"get_ipython", "f", "y"}),
    ],
)
def test_names_read(source: str, expected: set[str]) -> None:
    assert read(source) == expected


def test_a_callers_transform_is_used() -> None:
    assert names_in("§", transform=lambda text: text.replace("§", "z")).read == {"z"}


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = (", 1),
        ("%%distributed\nx = 1\ny = = 2", 3),
        ("\n\n\ndef f(:\n  pass", 4),
        ("%%distributed\n\nreturn 1", 3),
    ],
)
def test_a_cell_that_does_not_compile(source: str, line: int) -> None:
    with pytest.raises(SyntaxError) as caught:
        names_in(source)
    assert caught.value.lineno == line


def test_a_cells_warnings_are_left_to_its_run() -> None:
    assert names_in(r"s = '\d' + t").read == {"t"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\ny: int = 2\nz: int", {"x", "y"}),
        ("if a:\n    b = 1\nfor c in d:\n    e = 1\nwhile (f := g()):\n    pass", {"b", "c", "e", "f"}),
        ("with a as (b, c):\n    pass\ntry:\n    pass\nexcept E as e:\n    pass", {"b", "c", "e"}),
        ("import a.b, c as d\nfrom m import f as g", {"a", "d", "g"}),
        ("def f():\n    global g\n    g = 1\n    local = 2", {"f", "g"}),
        ("class A:\n    x = 1\n    global y\n    y = 2", {"A", "y"}),
        ("[w := i for i in xs]\n[v for v in xs]", {"w"}),
        (
            "match p:\n    case {'k': k, **rest}:\n        pass\n    case [a, *b] as c:\n        pass",
            {"k", "rest", "a", "b", "c"},
        ),
        ("x.y = 1\nx[0] = 2", set()),
        ("%matplotlib inline\nx = 1", {"x", "inline"}),
        ("%%capture out\nx = 1", {"x", "out"}),
        ("!ls\nfiles = !ls", {"files"}),
    ],
)
def test_names_stored(source: str, expected: set[str]) -> None:
    stored = names_in(source).stored
    assert stored is not None
    assert stored >= expected
    assert not {"local", "v", "i"} & stored
    if "%" not in source:
        assert stored == expected


@pytest.mark.parametrize(
    "source", ["exec(code)", "from m import *", "globals()['x'] = 1", "%run other.py", "%store -r x"]
)
def test_names_stored_that_can_not_be_known(source: str) -> None:
    assert names_in(source).stored is None


def test_collect_takes_what_is_read_and_exists() -> None:
    user_ns: dict[str, object] = {"model": 1, "cfg": 2, "unused": 3}
    assert collect({"cfg", "model", "nothere", "print"}, user_ns) == {"model": 1, "cfg": 2}
    assert list(collect(["cfg", "model"], user_ns)) == ["model", "cfg"]
    assert collect({"cfg"}, user_ns, extra=["unused"]) == {"cfg": 2, "unused": 3}
    assert collect({"cfg", "model"}, user_ns, exclude=["cfg"]) == {"model": 1}


def test_collect_leaves_ipythons_own_here() -> None:
    probe = """
    from IPython.core.interactiveshell import InteractiveShell
    from sgpu_magic.payload.namespace import collect
    shell = InteractiveShell.instance()
    for cell in ("2 + 2", "x = 5", "3", "x"):
        shell.run_cell(cell, store_history=True)
    user_ns = shell.user_ns
    print(sorted(collect(user_ns, user_ns)))
    user_ns["open"] = user_ns["display"] = user_ns["max"] = lambda: 1
    print(sorted(collect(user_ns, user_ns)))
    print(sorted(collect([], user_ns, extra=["_1"])))
    """
    done = subprocess.run([sys.executable, "-c", dedent(probe)], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == ["['x']", "['display', 'max', 'open', 'x']", "['_1']"], done.stdout


def test_builtins_only_when_shadowed() -> None:
    user_ns: dict[str, object] = {"print": print, "sum": lambda xs: 0, "none": None}
    assert set(collect({"print", "sum", "none"}, user_ns)) == {"sum", "none"}


def test_a_misspelt_in_is_told_with_what_is_near() -> None:
    with pytest.raises(UsageError) as caught:
        collect([], {"model": 1, "models": 2, "x": 3}, extra=["modle"])
    assert str(caught.value) == "the notebook has no `modle`, which --in names. Did you mean `model` or `models`?"
    with pytest.raises(UsageError) as caught:
        collect([], {"x": 3}, extra=["loader"])
    assert str(caught.value) == (
        "the notebook has no `loader`, which --in names. Define it in an earlier cell or remove it from --in."
    )
    with pytest.raises(UsageError, match="in both --in and --exclude"):
        collect([], {"x": 3}, extra=["x"], exclude=["x"])


def test_submodules_that_a_cell_reaches() -> None:
    import xml

    assert "xml.etree.ElementTree" in submodules_read(["xml", "etree", "ElementTree", "parse"], [xml, 3])
    assert submodules_read(["xml", "parse"], [xml, 3]) == ()
    assert submodules_read(["x"], [types, 3]) == ()


def test_cell_sources_are_those_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "<cell-a>", (9, None, ["def f():\n", "    pass\n"], "<cell-a>"))
    linecache.getlines(__file__)
    sources = cell_sources(["<cell-a>", __file__, "<gone>", "<cell-a>"], {"<cell-a>": 7})
    assert sources == (("<cell-a>", "def f():\n    pass\n", 7),)
