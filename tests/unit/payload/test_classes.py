"""A notebook's classes with hooks and `typing` objects: rebuilt without running the hooks again."""

# ruff: noqa: E501  cells stay as they are

from __future__ import annotations

import sys
import typing
from pathlib import Path

import pytest
from far_sides import KEY, FarSide, Notebook

from sgpu_magic.payload.pack import pack_object
from sgpu_magic.payload.unpack import unpack

HOOKS = """
    import abc, torch
    class Base:
        def __init_subclass__(cls, /, arg, **kw):
            super().__init_subclass__(**kw)
            cls.arg = arg
    class Child(Base, arg="hello"): pass
    class GrandChild(Child, arg="again"): pass
    steps = {}
    class Stage(torch.nn.Module):
        def __init_subclass__(cls, **kw):
            super().__init_subclass__(**kw)
            steps[cls.__name__] = cls
    class First(Stage):
        def forward(self, x): return x + 1
    plugins = []
    class Plugin:
        known = {}
        def __init_subclass__(cls, **kw):
            plugins.append(cls.__name__)
            Plugin.known[cls.__name__] = cls
    class One(Plugin): pass
    class Slotted(Plugin):
        __slots__ = ("x",)
    class OfDict(dict, Plugin): pass
    class Meta(type):
        made = []
        def __new__(meta, name, bases, namespace, *, must):
            meta.made.append(name)
            return super().__new__(meta, name, bases, namespace)
        def __init__(cls, name, bases, namespace, *, must):
            super().__init__(name, bases, namespace)
            cls.must = must
    class WithKeyword(metaclass=Meta, must=1): pass
    class AbstractMeta(abc.ABCMeta):
        count = 0
        def __new__(meta, *args, **kw):
            AbstractMeta.count += 1
            return super().__new__(meta, *args, **kw)
    class Abstract(metaclass=AbstractMeta):
        @abc.abstractmethod
        def area(self): ...
    class Square(Abstract):
        def area(self): return 4
    Abstract.register(int)
"""
SEEN = {
    "Child": ("Child.arg, Child.__bases__[0] is Base", ["hello", True]),
    "GrandChild": ("GrandChild.arg, GrandChild.mro()[1] is Child", ["again", True]),
    "First": ("First()(torch.ones(1)).item(), list(steps), steps['First'] is First", [2.0, ["First"], True]),
    "plugins, One": ("plugins, One.known['One'] is One", [["One", "Slotted", "OfDict"], True]),
    "plugins, Slotted": ("len(plugins), Slotted.__slots__, isinstance(Slotted(), Plugin)", [3, ["x"], True]),
    "plugins, OfDict": ("len(plugins), OfDict(a=1)", [3, {"a": 1}]),
    "WithKeyword": ("WithKeyword.must, type(WithKeyword).made", [1, ["WithKeyword"]]),
    "Square": (
        "type(Square).count, Square().area(), Square.__abstractmethods__ == frozenset(), isinstance(3, Abstract), "
        "list(Abstract.__abstractmethods__)",
        [2, 4, True, True, ["area"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("names", SEEN)
def test_hooks_of_the_notebook_are_not_run_again(notebook: Notebook, far_side: FarSide, names: str) -> None:
    notebook.cell(HOOKS)
    expression, expected = SEEN[names]
    packed = notebook.pack(*names.split(", "))
    assert far_side.run(packed, f"import torch\nanswer = list(({expression}))") == expected


def test_hooks_are_there_for_new_classes(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell(HOOKS)
    code = "class Late(Plugin): pass\nanswer = [plugins[-1], Plugin.known['Late'] is Late]"
    assert far_side.run(notebook.pack("One", "plugins"), code) == ["Late", True]


@pytest.mark.slow
def test_hooks_of_packages_run(
    notebook: Notebook, far_side: FarSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their registries are not sent, so the class has to be registered there too; arguments may be missing."""
    (tmp_path / "hooked.py").write_text(
        "registry = []\n"
        "class Base:\n"
        "    def __init_subclass__(cls, **kw): registry.append(cls.__name__)\n"
        "class Strict:\n"
        "    def __init_subclass__(cls, *, level, **kw): cls.level = level\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    notebook.cell("import hooked\nclass A(hooked.Base): pass\nclass B(hooked.Strict, level=3): pass")
    packed = notebook.pack("A", "B")
    assert far_side.run(packed, "import hooked\nanswer = [hooked.registry, B.level]", path=str(tmp_path)) == [["A"], 3]
    sys.modules.pop("hooked")


TYPING = """
    import dataclasses, typing
    from typing import (Annotated, Callable, Concatenate, Generic, Literal, NamedTuple, NewType, ParamSpec, Protocol, TypedDict,
                        TypeVar, TypeVarTuple, Unpack, runtime_checkable)
    UserId = NewType("UserId", int)
    AdminId = NewType("AdminId", UserId)
    T = TypeVar("T"); P = ParamSpec("P"); Ts = TypeVarTuple("Ts")
    Mode = Literal["a", "b"]
    Call = Callable[Concatenate[int, P], T]
    Many = tuple[int, Unpack[Ts]]
    class Movie(TypedDict, total=False):
        name: str
        owner: UserId
    @runtime_checkable
    class Sized(Protocol):
        def size(self) -> int: ...
    class Row(NamedTuple):
        owner: UserId
        n: int = 1
    @dataclasses.dataclass
    class Data:
        owner: UserId
        mode: Mode = "a"
    class Box(Generic[T]):
        def size(self): return 1
    class Wrapped(Generic[P, T]):
        def __init__(self, f: Callable[P, T]): self.f = f
    def annotated(x: UserId, *rest: Unpack[Ts]) -> Annotated[UserId, "u"]: return x
    def decorator(f: Call) -> Callable[P, T]: return f
    args = P.args
    everything = dict(user=UserId, admin=AdminId, p=P, ts=Ts, mode=Mode, call=Call, many=Many, movie=Movie, box=Box[UserId], args=args,
                      wrapped=Wrapped[[int], str])
"""
TYPING_SEEN = {
    "UserId": ("[UserId(3), UserId.__name__, UserId.__module__, UserId.__supertype__ is int]", [3, "UserId", "__main__", True]),
    "AdminId, UserId": ("[AdminId.__supertype__ is UserId]", [True]),
    "P, args": ("[P.__name__, args.__origin__ is P, P.args == args]", ["P", True, True]),
    "Ts, Many": ("[Ts.__name__, Many.__parameters__ == (Ts,), repr(Ts)]", ["Ts", True, "Ts"]),
    "Call, P, T": ("[Call.__parameters__ == (P, T)]", [True]),
    "Mode": ("[Mode.__args__]", [["a", "b"]]),
    "Movie, UserId": ("[Movie(name='x'), Movie.__total__, Movie.__annotations__['owner'] is UserId]", [{"name": "x"}, False, True]),
    "Sized, Box": ("[isinstance(Box(), Sized), isinstance(3, Sized), Sized._is_protocol]", [True, False, True]),
    "Row, UserId": ("[Row(2), Row._field_defaults, Row.__annotations__['owner'] is UserId]", [[2, 1], {"n": 1}, True]),
    "Data, UserId": ("[Data(4).owner, Data.__dataclass_fields__['owner'].type is UserId]", [4, True]),
    "Box, T": ("[Box.__parameters__ == (T,), Box[int].__origin__ is Box]", [True, True]),
    "Wrapped, P, T": ("[Wrapped.__parameters__ == (P, T)]", [True]),
    "annotated, UserId": ("[annotated(5), annotated.__annotations__['x'] is UserId]", [5, True]),
    "decorator": ("[decorator(3)]", [3]),
    "everything": ("[sorted(everything)[0], everything['admin'].__supertype__ is everything['user']]", ["admin", True]),
}  # fmt: skip


@pytest.mark.parametrize("names", TYPING_SEEN)
@pytest.mark.slow
def test_typing_objects_of_the_notebook(notebook: Notebook, far_side: FarSide, names: str) -> None:
    notebook.cell(TYPING)
    expression, expected = TYPING_SEEN[names]
    assert far_side.run(notebook.pack(*names.split(", ")), f"answer = {expression}") == expected


def test_typing_objects_come_back_as_themselves(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell(TYPING)
    far_side.run(notebook.pack("UserId", "P", "Ts", "T"), "back = [UserId, P, Ts, T]\nanswer = 0", back=True)
    back = far_side.back(notebook.namespace)
    assert [each is notebook.namespace[each.__name__] for each in back] == [True] * 4


def test_those_of_modules_go_by_reference() -> None:
    for obj in (typing.AnyStr, str):
        packed = pack_object(obj, {"__name__": "__main__"}, KEY)
        assert unpack(packed.to_bytes(), packed.layout, KEY, {}) is obj


ALIASES = """
    type Ints = list[int]
    type Tree = dict[str, Tree] | int
    type Pair[T] = tuple[T, T]
    def first(x: Ints) -> int: return x[0]
    def pick[T, **P](f: Pair[T], *args: P.args) -> T: return f[0]
    class Holder[T]:
        x: T
        def get(self) -> T: return self.x
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the statement came with 3.12")
def test_aliases(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell(ALIASES)
    packed = notebook.pack("Ints", "Tree", "Pair", "first", "pick", "Holder")
    code = """
        answer = [first([3]), Ints.__value__ == list[int], Tree.__value__.__args__[0].__args__[1] is Tree, Tree.__name__,
                  Pair[int].__origin__ is Pair, Pair.__value__.__args__[0] is Pair.__type_params__[0], pick((1, 2)),
                  first.__annotations__["x"] is Ints, Holder.__type_params__[0].__name__]
    """
    assert far_side.run(packed, code) == [3, True, True, "Tree", True, True, 1, True, "T"]
