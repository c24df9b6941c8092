"""Packing and unpacking between two processes: a notebook's namespace here, a rank's over there."""

# ruff: noqa: E501  cells and messages stay on one line

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import mmap
import os
import pickle
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from examples import examples
from far_sides import KEY, FarSide, Notebook
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_modules import pandas as pd
from lazy_modules import torch

from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.payload import buffers
from sgpu_magic.payload.pack import Packed, pack_namespace, pack_object
from sgpu_magic.payload.tensors import own_device
from sgpu_magic.payload.unpack import map_private, unpack, unpack_namespace
from sgpu_magic.system import processes
from sgpu_magic.wire.attachments import PackedLayout

# ---------------------------------------------------------------- functions and classes of the notebook


def test_functions_stand_on_the_ranks_namespace(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        cfg = {"lr": 1}
        unused = "x" * 100_000
        def lr():
            return cfg["lr"]
        def train():
            return lr() * 10
    """)
    packed = notebook.pack("train")
    assert sorted(packed.names) == ["cfg", "lr", "train"]
    assert packed.total_bytes < 5_000
    assert packed.files == ("<cell-1>",)
    answer = far_side.run(
        packed,
        """
        first = train()
        cfg = {"lr": 7}
        answer = [first, train(), train.__globals__ is globals(), lr.__globals__ is globals(), train.__module__]
    """,
    )
    assert answer == [10, 70, True, True, "__main__"]


def test_functions_keep_the_files_of_their_code(notebook: Notebook, far_side: FarSide) -> None:
    """Tracebacks find the cell by this name. cloudpickle 3.1.3 writes the same name in place of all files."""
    notebook.cell("""
        def outer():
            def inner(): pass
            return inner
        class A:
            def go(self): pass
    """)
    ask = "answer = [code.co_filename for code in (outer.__code__, outer().__code__, A.go.__code__)]"
    assert far_side.run(notebook.pack("outer", "A"), ask) == ["<cell-1>"] * 3


def test_a_large_global_travels_once(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        text = "ab" * 500_000
        def f(): return len(text)
        def g(): return text[0]
        functions = [f, g, lambda: text[1]]
    """)
    packed = notebook.pack("functions", "f", "g")
    assert 1_000_000 < packed.total_bytes < 1_010_000
    assert packed.sizes["text"] > 1_000_000
    assert packed.sizes["f"] < 2_000
    assert far_side.run(packed, "answer = [f(), g(), [h() for h in functions], functions[0] is f]") == [
        1_000_000, "a", [1_000_000, "a", "b"], True,
    ]  # fmt: skip


def test_names_are_found_through_everything_that_holds_functions(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import functools, math, dataclasses
        a = b = c = d = e = g = h = 0
        a, b, c, d, e, g, h, k, m = range(1, 10)
        def deco(f):
            @functools.wraps(f)
            def wrapper(*args):
                return f(*args) + a
            return wrapper
        @deco
        def decorated(x): return x + b
        def closing():
            inner = lambda: c
            return lambda: inner()
        closed = closing()
        class Base:
            def value(self): return d
        class Net(Base):
            @property
            def prop(self): return e
            @staticmethod
            def stat(): return g
            @classmethod
            def klass(cls): return h
            def value(self): return super().value() + math.floor(0.5)
        net = Net()
        bound = Net().value
        part = functools.partial(lambda x: x + k, 1)
        def nested():
            class Inner:
                y = m
            return Inner.y
        box = {"all": [decorated, (closed, {1: part}), bound, nested]}
    """)
    packed = notebook.pack("box", "net")
    assert set("abcdeghkm") | {"Net", "Base", "math"} <= set(packed.names)
    answer = far_side.run(
        packed,
        """
        decorated, (closed, parts), bound, nested = box["all"]
        answer = [decorated(0), closed(), net.value(), net.prop, net.stat(), net.klass(), parts[1](), bound(), nested()]
    """,
    )
    assert answer == [3, 3, 4, 5, 6, 7, 9, 4, 9]


def test_what_is_excluded_or_ipythons_stays(notebook: Notebook) -> None:
    notebook.cell("""
        secret = 1
        In, _oh, _i3 = ["x"], {}, "x"
        def f(): return secret, In, _oh, _i3, print
    """)
    assert notebook.pack("f", exclude=frozenset({"secret"})).names == ("f",)
    assert set(notebook.pack("f").names) == {"f", "secret"}


def test_functions_of_many_kinds(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import functools, asyncio
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
        def counter():
            count = 0
            def add():
                nonlocal count
                count += 1
                return count
            def get():
                return count
            return add, get
        add, get = counter()
        add()
        async def later(x): 
            await asyncio.sleep(0)
            return x + 1
        def numbers(n):
            yield from range(n)
        @functools.lru_cache(maxsize=7)
        def cached(n): return n + len(names)
        names = ["a"]
        def annotated(x: "int", *, y: float = 2.0) -> str:
            "Says."
            return f"{x}{y}"
        annotated.tag = names
        def recursive_closure():
            def walk(n): return 0 if n == 0 else 1 + walk(n - 1)
            return walk
        walk = recursive_closure()
        @functools.singledispatch
        def kind(x): return "any"
        @kind.register
        def _(x: int): return "int" + names[0]
        class Lazy:
            @functools.cached_property
            def value(self): return [len(names)]
            @functools.lru_cache
            def method(self): return 4
        lazy = Lazy()
        fs = [even, factorial, (add, get), later, numbers, cached, annotated, walk, kind, lazy]
    """)
    packed = notebook.pack("fs")
    answer = far_side.run(
        packed,
        """
        import asyncio
        even, factorial, (add, get), later, numbers, cached, annotated, walk, kind, lazy = fs
        answer = [even(10), factorial(5), add(), get(), asyncio.run(later(1)), list(numbers(3)), cached(1),
                  cached.cache_info().maxsize, annotated(1), annotated.__doc__, annotated.tag is names,
                  annotated.__annotations__["x"], annotated.__kwdefaults__, walk(4), names, kind(1), kind("x"), lazy.value is lazy.value, lazy.method()]
    """,
    )
    assert answer == [
        True,
        120,
        2,
        2,
        2,
        [0, 1, 2],
        2,
        7,
        "12.0",
        "Says.",
        True,
        "int",
        {"y": 2.0},
        4,
        ["a"],
        "inta",
        "any",
        True,
        4,
    ]


def test_classes_of_many_kinds(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import abc, collections, dataclasses, enum, typing
        scale = 2
        @dataclasses.dataclass(frozen=True)
        class Point:
            x: int
            y: int = 3
            tags: list = dataclasses.field(default_factory=list)
            def size(self): return (self.x + self.y) * scale
        class Color(enum.Enum):
            RED = 1
            BLUE = 2
            def shout(self): return self.name + "!"
        class Level(enum.IntFlag):
            A = 1
            B = 2
        Pair = collections.namedtuple("Pair", "left right")
        class Row(typing.NamedTuple):
            name: str
            n: int = 1
            def double(self): return self.n * scale
        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...
        class Square(Shape):
            __slots__ = ("side",)
            def __init__(self, side): self.side = side
            def area(self): return self.side ** 2
        class Oops(ValueError):
            def __init__(self, a, b): 
                super().__init__(a, b)
                self.b = b
        T = typing.TypeVar("T")
        class Stack(typing.Generic[T]):
            def __init__(self): self.items = []
        class Outer:
            class Inner:
                v = 5
        box = [Point(1), Color.BLUE, Level.A | Level.B, Pair(1, [2]), Row("r"), Square(3), Oops(1, 2), Stack[int](), Outer.Inner()]
    """)
    packed = notebook.pack("box")
    answer = far_side.run(
        packed,
        """
        import __main__, pickle
        point, color, level, pair, row, square, oops, stack, inner = box
        answer = [point.size(), point == Point(1), color.shout(), color is Color.BLUE, int(level), pair.right, row.double(),
                  square.area(), isinstance(square, Shape), [oops.b, isinstance(oops, ValueError)], stack.items, inner.v,
                  type(inner) is Outer.Inner, pickle.loads(pickle.dumps(point)) == point, __main__.Point is type(point)]
    """,
    )
    assert answer == [8, True, "BLUE!", True, 3, [2], 2, 9, True, [2, True], [], 5, True, True, True]


def test_a_constructor_that_runs_while_unpickling_finds_its_globals(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        registry = {}
        default = 4
        def make(n): return Thing(n + default)
        class Plugin:
            def __init_subclass__(cls): registry[cls.__name__] = default
        class Thing(Plugin):
            def __init__(self, n): self.n = n
            def __reduce__(self): return make, (self.n,)
        holder = {"things": [Thing(1)]}
    """)
    packed = notebook.pack("holder")
    assert far_side.run(packed, "answer = [holder['things'][0].n, registry['Thing']]") == [5, 4]


def test_identity_is_kept_across_names(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import numpy as np
        shared = [1]
        array = np.zeros(100_000)
        a = {"shared": shared, "array": array}
        b = (shared, array)
        loop = []
        loop.append(loop)
        def f(): return shared
        alias = f
    """)
    packed = notebook.pack("a", "b", "loop", "f", "alias")
    assert packed.total_bytes < 805_000
    assert (
        far_side.run(
            packed,
            """
        answer = [a["shared"] is b[0], a["array"] is b[1], loop[0] is loop, f() is b[0], alias is f]
    """,
        )
        == [True] * 5
    )


@pytest.mark.slow
def test_submodules_come_along(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("""
        import xml, xml.dom.minidom
        def parse(): return xml.dom.minidom.parseString("<a/>").documentElement.tagName
    """)
    code = "answer = [parse()]"
    side = FarSide(tmp_path)
    try:
        assert side.run(notebook.pack("parse"), code) == ["a"]
        asked = notebook.pack("xml", submodules=["xml.dom.minidom", "not.there"])
        assert side.run(asked, "answer = xml.dom.minidom.__name__") == "xml.dom.minidom"
    finally:
        side.close()


def test_a_magic_inside_a_function_is_read(notebook: Notebook) -> None:
    notebook.cell("""
        hidden, lr = 3, 4
        def f(): 
            get_ipython().run_line_magic("time", "hidden + 1")
            return get_ipython().getoutput("echo {lr}")
    """)
    assert set(notebook.pack("f").names) == {"f", "hidden", "lr"}


def test_values_in_a_fresh_interpreter_without_torch(notebook: Notebook, tmp_path: Path) -> None:
    import msgspec

    notebook.cell("""
        import numpy as np
        xs = np.arange(10_000)
        def total(): return int(xs.sum())
    """)
    packed = notebook.pack("total")
    (tmp_path / "data").write_bytes(packed.to_bytes())
    (tmp_path / "layout").write_bytes(msgspec.msgpack.encode(packed.layout))
    script = """
    import sys
    from sgpu_magic.payload import unpack, buffers, tensors
    heavy = {"torch", "numpy", "cloudpickle", "dill", "IPython"} & set(sys.modules)
    import msgspec
    from sgpu_magic.wire.run import PackedLayout
    layout = msgspec.msgpack.decode(open("layout", "rb").read(), type=PackedLayout)
    unpack.unpack_namespace(open("data", "rb").read(), layout, b"k" * 32, globals())
    xs[0] = 1
    print(heavy, total(), "torch" in sys.modules)
    """
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("set() 49995001 False\n", "")


# ---------------------------------------------------------------- results


def test_results_come_back_as_the_notebooks_own(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        offset = 1
        class Config:
            limit = 5
            def size(self): return self.n + offset
        class Oops(Exception): pass
        def helper(): return offset
        cfg = Config()
        cfg.n = 1
    """)
    config, size, oops = (
        notebook.namespace["Config"],
        vars(notebook.namespace["Config"])["size"],
        notebook.namespace["Oops"],
    )
    packed = notebook.pack("cfg", "helper", "Oops")
    far_side.run(
        packed,
        """
        import enum
        cfg.n = 10
        Config.limit = 99
        offset = 1000
        class New: 
            def size(self): return offset
        class Kind(enum.Enum):
            A = 1
        back = {"names": {"cfg": cfg, "helper": helper, "error": Oops("x"), "new": New(), "kind": Kind.A}, "value": New}
    """,
        back=True,
    )
    result = far_side.back(notebook.namespace)
    names = result["names"]
    assert type(names["cfg"]) is config
    assert (names["cfg"].size(), config.limit, vars(config)["size"]) == (11, 5, size)
    assert type(names["error"]) is oops
    assert names["helper"].__globals__ is notebook.namespace
    assert (names["helper"](), names["new"].size(), names["kind"].name) == (1, 1, "A")
    assert type(names["new"]) is result["value"]
    notebook.namespace["offset"] = 2
    assert names["helper"]() == 2


def test_a_result_carries_no_globals(notebook: Notebook) -> None:
    notebook.cell("text = 'x' * 100_000\ndef f(): return text")
    packed = pack_object(notebook.namespace["f"], notebook.namespace, KEY)
    assert packed.total_bytes < 2_000
    assert packed.names == ()


# ---------------------------------------------------------------- numpy, pandas, Arrow


def in_band_share(value: object) -> float:
    packed = pack_object(value, {}, KEY)
    return len(packed.pickle) / packed.total_bytes


def test_large_data_leaves_out_of_band(tmp_path: Path) -> None:
    n = 300_000
    frame = pd.DataFrame({"a": np.arange(n), "b": np.random.rand(n), "c": np.arange(n, dtype=np.int32)})
    on_disk = np.memmap(tmp_path / "m", dtype=np.float64, shape=(n,), mode="w+")
    table = pa.table({"x": np.arange(n), "s": ["text"] * n})
    cases = {
        "array": np.random.rand(n),
        "fortran": np.asfortranarray(np.random.rand(600, 500)),
        "strided": np.random.rand(n, 2)[:, 0],
        "reversed": np.arange(n)[::-1],
        "memmap": on_disk,
        "structured": np.zeros(n, dtype=[("a", "i4"), ("b", "f8")]),
        "frame": frame,
        "columns": frame[["b", "a"]],
        "rows": frame.iloc[5:-5],
        "stepped": frame.iloc[::2],
        "series": frame["b"],
        "strings": pd.Series(["text"] * n),
        "categories": pd.Series(["x", "y"] * (n // 2), dtype="category"),
        "dates": pd.DataFrame({"t": pd.date_range("2020", periods=n, freq="s")}, index=np.arange(n) * 2),
        "table": table,
        "batch": table.to_batches()[0],
        "arrow frame": table.to_pandas(types_mapper=pd.ArrowDtype),
    }
    shares = {name: in_band_share(value) for name, value in cases.items()}
    assert {name: share for name, share in shares.items() if share > 0.02} == {}
    for name, value in cases.items():
        packed = pack_object(value, {}, KEY)
        back: Any = unpack(packed.to_bytes(), packed.layout, KEY, {})
        assert type(back) is (np.ndarray if name == "memmap" else type(value))
        same = value.equals(back) if hasattr(value, "equals") else bool(np.array_equal(value, back))
        assert same, name


def test_arrays_lie_in_the_mapping_and_are_writable(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import numpy as np, pandas as pd
        array = np.ones(1_000_000)
        frozen = np.ones(1_000_000)
        frozen.flags.writeable = False
        frame = pd.DataFrame({"a": np.zeros(500_000)})
    """)
    answer = far_side.run(
        notebook.pack("array", "frozen", "frame"),
        """
        private = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty"))
        array[0] = 5
        frame.loc[3, "a"] = 7.0
        answer = [array[0], frozen.flags.writeable, array.flags.owndata, frame["a"].sum(), array.ctypes.data % 64]
    """,
    )
    assert answer == [5.0, False, False, 7.0, 0]
    assert notebook.namespace["array"][0] == 1.0  # pyright: ignore


def test_many_small_arrays_do_not_fill_the_table() -> None:
    packed = pack_object([np.full(10, n) for n in range(5_000)], {}, KEY)
    assert packed.layout.buffers == ()
    back: Any = unpack(packed.to_bytes(), packed.layout, KEY, {})
    back[4_999][0] = 1
    assert back[17][3] == 17


# ---------------------------------------------------------------- torch


def test_tensors_that_share_a_storage_still_share_it(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import torch
        base = torch.arange(1_000_000, dtype=torch.float32)
        view = base[10:20]
        turned = base.view(1000, 1000).t()
        every = base[::7]
        other = torch.ones(5)
    """)
    packed = notebook.pack("base", "view", "turned", "every", "other")
    assert len(packed.pickle) < 3_000
    assert len(packed.buffers) == 1
    answer = far_side.run(
        packed,
        """
        base[12] = -1
        answer = [view[2].item(), turned.stride(), turned[12, 0].item(), every.shape[0], every[1].item(), other.sum().item(),
                  base.data_ptr() % 64, base.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr()]
        base.share_memory_()
    """,
    )
    assert answer == [-1.0, [1, 1000], -1.0, 142_858, 7.0, 5.0, 0, True]


# torch warns about its own quantized tensors, both at creation and when they are rebuilt
@pytest.mark.filterwarnings("ignore:.*quantize.* are deprecated", "ignore:TypedStorage is deprecated")
def test_tensors_of_many_kinds() -> None:
    leaf = torch.randn(50, 50, requires_grad=True)
    tagged = torch.ones(3)
    tagged.tag = "x"  # pyright: ignore
    values: dict[str, torch.Tensor] = {
        "bf16": torch.randn(3000).to(torch.bfloat16),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "fp8 parameter": torch.nn.Parameter(torch.randn(64).to(torch.float8_e5m2), requires_grad=False),
        "uint16": torch.arange(3000).to(torch.uint16).view(30, 100).t(),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.5),
        "complex": torch.randn(600, dtype=torch.complex64),
        "conj": torch.randn(600, dtype=torch.complex64).conj(),
        "negative view": torch.randn(600, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(50).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.randn(2000), 0.1, 0, torch.qint8),
        "expanded": torch.ones(1).expand(1_000_000),
        "leaf": leaf,
        "made": leaf * 2,
        "parameter": torch.nn.Parameter(torch.ones(2000), requires_grad=False),
        "tagged": tagged,
        "transposed": torch.randn(100, 200).t(),
        "meta": torch.empty(1_000_000_000, device="meta"),
    }
    packed = pack_object(values, {}, KEY)
    assert packed.total_bytes < 300_000
    back: Any = unpack(packed.to_bytes(), packed.layout, KEY, {})
    for name, value in values.items():
        got = back[name]
        assert (type(got), got.dtype, got.shape, got.layout) == (
            type(value),
            value.dtype,
            value.shape,
            value.layout,
        ), name
        assert got.requires_grad == value.requires_grad, name
        assert got.is_leaf
        if name.startswith("fp8"):
            assert torch.equal(got.view(torch.uint8), value.view(torch.uint8))
        elif name != "meta":
            left, right = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (got, value))
            assert (
                torch.equal(left.dequantize(), right.dequantize()) if value.is_quantized else torch.equal(left, right)
            ), name
    assert back["tagged"].tag == "x"
    assert back["expanded"].stride() == (0,)


def test_a_module_and_its_optimizer_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 200))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 200)).sum().backward()
    optimizer.step()
    packed = pack_object((model, optimizer, model.state_dict()), {}, KEY)
    assert len(packed.pickle) < 20_000
    back: Any = unpack(packed.to_bytes(), packed.layout, KEY, {})
    back_model, back_optimizer, state = back
    assert back_model[2].weight is back_model[0].weight
    assert back_optimizer.param_groups[0]["params"][0] is back_model[0].weight
    assert state["0.weight"].data_ptr() == back_model[0].weight.data_ptr()
    model.eval(), back_model.eval()
    sample = torch.randn(4, 200)
    assert torch.equal(model(sample), back_model(sample))
    back_model(sample).sum().backward()
    back_optimizer.step()


def test_a_dataset_and_loader_of_the_notebook(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __init__(self): self.xs = torch.arange(5000.)
            def __len__(self): return len(self.xs)
            def __getitem__(self, i): return self.xs[i] ** power
        power = 2
        loader = DataLoader(Squares(), batch_size=1000, shuffle=True, generator=torch.Generator())
    """)
    assert far_side.run(notebook.pack("loader"), "answer = sum(b.sum().item() for b in loader)") == pytest.approx(
        float(sum(i * i for i in range(5000))), rel=1e-5
    )


def test_a_tensor_subclass_goes_torchs_way() -> None:
    from torch.nn.parameter import Buffer

    buffer = Buffer(torch.ones(5), persistent=False)
    packed = pack_object(buffer, {}, KEY)
    back: Any = unpack(packed.to_bytes(), packed.layout, KEY, {})
    assert torch.equal(back, buffer)
    assert isinstance(back, Buffer)
    assert back.persistent is False


# ---------------------------------------------------------------- what can't be pickled


class Lock:
    def __init__(self) -> None:
        self._lock = threading.Lock()


NO_PICKLE = """
import threading, io
class Dataset:
    def __init__(self): self._lock = threading.Lock()
class Loader:
    def __init__(self): self.dataset = Dataset()
loader = Loader()
"""


def why(notebook: Notebook, *names: str) -> str:
    with pytest.raises(SerializationError) as caught:
        notebook.pack(*names)
    return str(caught.value)


def test_the_culprit_is_named_with_the_remedy(notebook: Notebook) -> None:
    notebook.cell(NO_PICKLE)
    assert why(notebook, "loader") == (
        "the cell uses `loader`, which can't leave the notebook: loader.dataset._lock is a _thread.lock. Create it inside "
        "the cell, drop the lock in __getstate__, or keep the name out with --exclude loader."
    )


def test_a_culprit_behind_a_function(notebook: Notebook) -> None:
    notebook.cell(NO_PICKLE + "def batches(): return loader\ndef train(): return batches()")
    assert why(notebook, "train") == (
        "the cell uses `train`, which uses `batches`, which uses `loader`, which can't leave the notebook: "
        "loader.dataset._lock is a _thread.lock. Create it inside the cell, drop the lock in __getstate__, or keep the "
        "name out with --exclude loader."
    )


def test_a_culprit_in_a_class(notebook: Notebook) -> None:
    notebook.cell("import threading\nclass A:\n    lock = threading.Lock()\na = A()")
    assert why(notebook, "a") == (
        "the cell uses `a`, which uses `A`, which can't leave the notebook: A.lock is a _thread.lock. Create it inside the "
        "cell or keep the name out with --exclude a."
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("d = {'k': [1, 2, 3, threading.Lock()]}", "d['k'][3] is a _thread.lock. Create it inside the cell or keep"),
        ("lock = threading.RLock()", "lock is a _thread.RLock. Create it inside the cell or keep"),
        ("f = (lambda x: lambda: x)(threading.Lock())", "f.<closure x> is a _thread.lock."),
        ("def f(a, x=threading.Lock()): ...", "f.<default x> is a _thread.lock."),
        ("def f(*, x=threading.Lock()): ...", "f.<default x> is a _thread.lock."),
        ("import functools\nf = functools.partial(print, threading.Lock())", "f.args[0] is a _thread.lock."),
        ("class A:\n    __slots__ = ('x',)\na = A()\na.x = threading.Lock()", "a.x is a _thread.lock. Create it inside the cell, drop the lock in __getstate__, or"),
        ("class A:\n    def go(self): ...\na = A()\na.x = threading.Lock()\nf = a.go", "f.__self__.x is a _thread.lock."),
        ("log = open('/dev/null')", "log is an open file (/dev/null). Open it inside the cell or keep the name out with --exclude log."),
        ("log = open('/dev/null', 'rb')", "log is an open file (/dev/null). Open it inside the cell"),
        ("g = (i for i in range(3))", "g is a generator. Make it a list, create it inside the cell, or keep the name out with --exclude g."),
        ("import sqlite3\ndb = sqlite3.connect(':memory:')", "db is a SQLite connection. Connect inside the cell"),
        ("import socket\ns = socket.socket()", "s is a socket. Connect inside the cell"),
        ("async def c(): ...\nco = c()", "co is a coroutine. Await it in an earlier cell"),
        ("t = threading.Thread()", "t is a thread. Start it inside the cell"),
        ("from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()", "pool._"),
        ("class A:\n    def __getstate__(self): raise ValueError('not me')\na = {'x': A()}", "a['x'] is an A (ValueError: not me). Create it"),
        ("class B:\n    def __reduce__(self): return (list, ((i for i in 'ab'),))\nb = B()", "b holds a generator."),
        ("class B:\n    def __reduce__(self): return (list, ((i for i in 'ab'),))\nclass C: pass\nb = C()\nb.x = B()", "b.x holds a generator."),
        ("import torch\nm = torch.nn.Sequential(torch.nn.Linear(2, 2))\nm[0].hook = threading.Lock()", "m.0.hook is a _thread.lock."),
        ("import numpy as np\na = np.array([1, threading.Lock()], dtype=object)", "a[1] is a _thread.lock."),
        ("class A:\n    def __init__(self): self.x = threading.Lock()\ns = {A()}", "s.<item>.x is a _thread.lock."),
        ("import functools\nclass A:\n    go = staticmethod(functools.partial(print, threading.Lock()))\na = A", "a.go.__func__.args[0] is a _thread.lock."),
        ("import functools\nclass A:\n    go = property(functools.partial(print, threading.Lock()))\na = A", "a.go.fget.args[0] is a _thread.lock."),
        ("class A:\n    __slots__ = ('unset', 'x')\na = A()\na.x = threading.Lock()", "a.x is a _thread.lock."),
        ("def make():\n    f = lambda x=threading.Lock(): later\n    return f\n    later = 1\nf = make()", "f.<default x> is a _thread.lock."),
        ("import multiprocessing\nlock = multiprocessing.Lock()", "lock is a multiprocessing.synchronize.Lock (RuntimeError: Lock objects should only be shared between processes through inheritance). Create it"),
        ("class SparkSession:\n    __module__ = 'pyspark.sql.session'\n    __reduce__ = None\nspark = SparkSession()", "spark is Spark's SparkSession, which lives on the driver. Collect what the cell needs first with toPandas() or keep"),
        ("class MlflowClient:\n    __module__ = 'mlflow.tracking.client'\n    __reduce__ = None\nclient = MlflowClient()", "client is an MLflow client. Create it inside the cell or keep"),
        ("class Store:\n    __module__ = 'mlflow.store'\n    __reduce__ = None\nstore = Store()", "store is MLflow's Store. Create it inside the cell or keep"),
        ("class Stream:\n    __module__ = 'torch.cuda.streams'\n    __reduce__ = None\ns = Stream()", "s is a CUDA stream. Create it inside the cell or keep"),
        ("x = []\nfor _ in range(100_000): x = [x]", "x is nested deeper than pickle can follow. Build it inside the cell"),
    ],
)  # fmt: skip
def test_culprits(notebook: Notebook, source: str, says: str) -> None:
    notebook.cell("import threading\n" + source)
    name = source.rsplit("\n")[-1].replace("def ", "").split("(")[0].split("=")[0].split(".")[0].strip()
    name = {"for _ in range": "x", "m[0]": "m"}.get(name, name)
    message = why(notebook, name)
    assert message.startswith(f"the cell uses `{name}`, which can't leave the notebook: {says}"), message
    assert message.endswith(f"keep the name out with --exclude {name}.")
    for value in list(notebook.namespace.values()):
        if isinstance(value, sqlite3.Connection | socket.socket | io.IOBase | types.CoroutineType):
            value.close()


def test_to_name_a_culprit_makes_no_copies(notebook: Notebook) -> None:
    """A copy's side effects on creation or deletion may affect the original: a widget closes its view."""
    notebook.cell("""
        made = []
        class Held:
            def __setstate__(self, state): made.append(self)
            def __getstate__(self): return {"x": 1}
        class Odd:
            def __reduce__(self): return (list, ((i for i in "ab"),))
        class Holder: pass
        holder = Holder()
        holder.held, holder.odd = Held(), Odd()
    """)
    assert "holder.odd holds a generator." in why(notebook, "holder")
    assert notebook.namespace["made"] == []


def test_a_running_asyncio_task(notebook: Notebook) -> None:
    async def cell() -> str:
        notebook.namespace["task"] = task = asyncio.create_task(asyncio.sleep(10))
        try:
            return why(notebook, "task")
        finally:
            task.cancel()

    message = asyncio.run(cell())
    assert "task is a running asyncio task. Await it in an earlier cell or keep the name out" in message


@pytest.mark.slow
def test_the_search_ends_soon_on_big_and_circular_things(notebook: Notebook) -> None:
    notebook.cell("""
        import threading
        big = [{"n": i, "next": [str(i)]} for i in range(500_000)]
        big.append(big)
        big[0]["self"] = big
        big.append({"x": {"y": threading.Lock()}})
    """)
    # CPU time, since the machine may be busy
    begin = time.thread_time()
    message = why(notebook, "big")
    assert time.thread_time() - begin < 4
    assert "a _thread.lock" in message


def test_standard_streams_and_loggers_travel(notebook: Notebook) -> None:
    notebook.cell("""
        import logging, sys
        log = logging.getLogger("x")
        class Printer:
            def __init__(self): self.out = sys.stderr
        printer = Printer()
    """)
    packed = notebook.pack("log", "printer")
    namespace: dict[str, object] = {}
    unpack_namespace(packed.to_bytes(), packed.layout, KEY, namespace)
    assert namespace["printer"].out is sys.stderr  # pyright: ignore
    assert namespace["log"] is notebook.namespace["log"]


def test_a_result_that_can_not_come_back(notebook: Notebook) -> None:
    for obj, says in [
        (
            {"names": {"fine": 1, "history": Lock()}, "value": None},
            "`history` can't come back to the notebook: history._lock is a _thread.lock. Return plain data instead or drop "
            "the lock in __getstate__.",
        ),
        (
            {"names": {}, "value": [threading.Lock()]},
            "the cell's value can't come back to the notebook: the cell's value[0] is a _thread.lock. Return plain data "
            "instead.",
        ),
    ]:
        with pytest.raises(SerializationError) as caught:
            pack_object(obj, notebook.namespace, KEY)
        assert str(caught.value) == says


def test_what_can_not_be_rebuilt_is_named(notebook: Notebook) -> None:
    notebook.cell("""
        import json
        class Picky:
            def __setstate__(self, state): raise RuntimeError("only at home")
        p = Picky()
        p.x = 1
    """)
    packed = notebook.pack("p")
    with pytest.raises(SerializationError, match="`p` can't be rebuilt on the other side: RuntimeError: only at home"):
        unpack_namespace(packed.to_bytes(), packed.layout, KEY, {})


# ---------------------------------------------------------------- signature and bounds


def test_changed_bytes_are_refused_before_unpickling(tmp_path: Path) -> None:
    packed = pack_object({"a": np.zeros(10_000)}, {}, KEY)
    data, layout = packed.to_bytes(), packed.layout
    mark = tmp_path / "mark"
    evil = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    pickle_size = layout.pickle_size
    offset, size = layout.buffers[0]
    cases: list[tuple[bytes, PackedLayout, bytes]] = [
        (data, layout, b"other key"),
        (evil.ljust(pickle_size, b".") + data[pickle_size:], layout, KEY),
        (data, PackedLayout(pickle_size=pickle_size - 1, buffers=layout.buffers, mac=layout.mac), KEY),
        (data, PackedLayout(pickle_size=pickle_size, buffers=(), mac=layout.mac), KEY),
        (data, PackedLayout(pickle_size=pickle_size, buffers=((offset, size - 8),), mac=layout.mac), KEY),
        (data, PackedLayout(pickle_size=pickle_size, buffers=layout.buffers, mac=b""), KEY),
    ]
    for bad_data, bad_layout, key in cases:
        with pytest.raises(SerializationError, match="does not carry this run's signature, so it was not unpickled"):
            unpack(bad_data, bad_layout, key, {})
    for bad_data, bad_layout in [
        (data[:-1], layout),
        (data[: pickle_size - 1], layout),
        (data, PackedLayout(pickle_size=-1, buffers=(), mac=b"")),
        (data, PackedLayout(pickle_size=pickle_size, buffers=((0, 8),), mac=b"")),
        (data, PackedLayout(pickle_size=pickle_size, buffers=((offset, -8),), mac=b"")),
    ]:
        with pytest.raises(SerializationError, match="was truncated in transit"):
            unpack(bad_data, bad_layout, KEY, {})
    assert not mark.exists()


def test_a_packed_function_can_not_be_read_without_unpack(notebook: Notebook) -> None:
    import pickle

    notebook.cell("def f(): ...")
    packed = pack_object(notebook.namespace["f"], notebook.namespace, KEY)
    with pytest.raises(SerializationError, match=r"only be read by sgpu_magic\.payload\.unpack"):
        pickle.loads(packed.pickle)


# ---------------------------------------------------------------- storage of bytes


def sample(size: int = 3_000_000) -> Packed:
    rng = np.random.default_rng(0)
    return pack_object([rng.bytes(100), rng.integers(0, 255, size, dtype=np.uint8), np.arange(5_000)], {}, KEY)


def test_every_place_holds_the_same_bytes(tmp_path: Path) -> None:
    packed = sample(40_000_000)
    inline = packed.to_bytes()
    assert len(inline) == packed.total_bytes
    target = bytearray(packed.total_bytes)
    buffers.write_packed(packed, memoryview(target))
    assert bytes(target) == inline
    buffers.write_file(packed, tmp_path / "payload")
    assert (tmp_path / "payload").read_bytes() == inline
    assert (tmp_path / "payload").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["payload"]
    with contextlib.closing(buffers.SharedBuffer()) as shared:
        shared.write(packed)
        mapped = map_private(shared.fd, shared.size)
        assert mapped[: packed.total_bytes] == inline
        back: Any = unpack(mapped, packed.layout, KEY, {})
        back[1][:10] = 0
        assert os.pread(shared.fd, packed.total_bytes, 0) == inline
    assert all(offset % 64 == 0 for offset, _ in packed.layout.buffers)


def test_a_shared_buffer_grows_is_reused_and_closes() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    shared = buffers.SharedBuffer()
    assert (os.get_inheritable(shared.fd), shared.size) == (False, 0)
    sizes: list[int] = []
    for size in (1_000_000, 20_000_000, 5_000):
        packed = sample(size)
        shared.write(packed)
        sizes.append(shared.size)
        private = map_private(shared.fd, shared.size)
        back: Any = unpack(private, packed.layout, KEY, {})
        assert len(back[1]) == size
        del back, private
    assert sizes[0] >= 1_000_000 > 4_096
    assert sizes[1] == sizes[2] >= 20_000_000
    assert sizes[1] % mmap.PAGESIZE == 0
    shared.close()
    shared.close()
    with pytest.raises(ValueError, match="closed"):
        shared.ensure(1)
    del shared
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_packing_holds_no_memory_afterwards() -> None:
    import weakref

    tensor = torch.ones(1_000_000)
    seen = weakref.ref(tensor)
    gc.disable()
    try:
        packed = pack_namespace({"tensor": tensor}, {"tensor": tensor}, KEY)
        del packed, tensor
        assert seen() is None
    finally:
        gc.enable()


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = msgspec.structs.replace(sample(), total_bytes=10**18)
    with pytest.raises(UsageError) as caught:
        buffers.write_file(packed, tmp_path / "payload")
    assert str(caught.value).startswith(
        f"the cell's variables take 1,000,000,000.0 GB, but the disk under {tmp_path} has only"
    )
    monkeypatch.setattr(buffers.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**12))
    with pytest.raises(UsageError, match="can't be written under /dev/full: Not a directory"):
        buffers.write_file(sample(), "/dev/full/payload")
    assert os.listdir(tmp_path) == []


def test_memory_available_is_sane() -> None:
    available = processes.memory_available_bytes()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1_000_000 < available <= total


def test_small_things_fit_a_message() -> None:
    assert buffers.INLINE_LIMIT == 65536
    packed = pack_object({"x": 1}, {}, KEY)
    assert packed.total_bytes == len(packed.to_bytes()) < 200


def test_sizes_tell_heavy_names(notebook: Notebook) -> None:
    notebook.cell("import torch\nbig = torch.zeros(30_000_000)\nsmall = 1")
    packed = notebook.pack("small", "big")
    assert packed.sizes["big"] > 120_000_000
    assert packed.sizes["small"] < 100
    assert packed.total_bytes >= sum(packed.sizes.values())


# ---------------------------------------------------------------- plain values, at random

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9000),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), plain))
def test_plain_values_round_trip(values: dict[str, object]) -> None:
    packed = pack_namespace(values, values, KEY)
    namespace: dict[str, object] = {}
    unpack_namespace(packed.to_bytes(), packed.layout, KEY, namespace)
    assert namespace == values
    with tempfile.TemporaryFile() as file:
        file.write(packed.to_bytes())
        file.flush()
        again: dict[str, object] = {}
        unpack_namespace(map_private(file.fileno(), packed.total_bytes), packed.layout, KEY, again)
        assert again == values


@pytest.mark.parametrize(
    ("local_rank", "uses_cuda", "device"),
    [("1", False, "cuda:1"), ("1", True, "cuda:1"), ("", False, "cpu"), ("", True, "cuda:0")],
)
def test_cuda_tensors_go_to_a_ranks_gpu_and_to_that_of_a_notebook_only_if_it_uses_one(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, uses_cuda: bool, device: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert str(own_device()) == device


# ---------------------------------------------------------------- for other versions of NumPy


def numpy_values() -> dict[str, Any]:
    values: dict[str, Any] = {
        "numbers": np.arange(10_000.0),
        "few": np.arange(3),
        "no dimension": np.array(5.0),
        "none": np.zeros((0, 3)),
        "no dates": np.zeros(0, "M8[s]"),
        "columns": np.asfortranarray(np.ones((30, 50))),
        "slice": np.arange(10_000)[::2],
        "backwards": np.arange(9)[::-1],
        "axes": np.ones((3, 4, 5)).transpose(1, 0, 2),
        "repeated": np.broadcast_to(np.ones(3), (4, 3)),
        "records": np.zeros(100, [("a", "f8"), ("b", "M8[s]")]),
        "dates": np.arange(5000).astype("M8[s]"),
        "texts": np.array(["a", "bc"]),
        "bytes": np.ones(3, "S3"),
        "void": np.zeros(3, "V8"),
        "big-endian": np.arange(5).astype(">i4"),
        "complex": np.ones(5, complex),
        "booleans": np.ones(5, bool),
        "scalar": np.float64(1.5),
        "polynomial": np.polynomial.Polynomial([1, 2]),
        "type": np.dtype("f4"),
        "function": np.linalg.norm,
        "read-only": np.arange(9),
    }
    values["read-only"].flags.writeable = False
    return values


# names of NumPy 2 that NumPy 1.26 has too
_IN_NUMPY_1 = re.compile(r"numpy|numpy\.(linalg|polynomial\.\w+|random\.bit_generator|_core\.multiarray)")


@pytest.mark.parametrize("name", numpy_values())
def test_arrays_name_nothing_that_an_older_numpy_lacks(name: str):
    value = numpy_values()[name]
    packed = pack_object(value, {}, b"key")
    assert [module for module, _ in packed.modules if "numpy" in module and not _IN_NUMPY_1.fullmatch(module)] == []
    stream = pickle.loads(packed.pickle, buffers=[bytearray(view) for view in packed.buffers])
    if isinstance(value, np.ndarray):
        assert (stream.dtype, stream.shape) == (value.dtype, value.shape)
        assert (stream == value).all()


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, np.random.PCG64, np.random.SFC64])
def test_random_numbers_go_on_where_they_were(make: Any):
    generator = make(7)
    draw: Any = getattr(generator, "normal", None) or generator.random_raw
    draw()
    packed = pack_object(generator, {}, b"key")
    assert "numpy.random._pickle" not in dict(packed.modules)
    copy = pickle.loads(packed.pickle, buffers=[bytearray(view) for view in packed.buffers])
    draw_copy: Any = getattr(copy, "normal", None) or copy.random_raw
    assert [draw_copy() for _ in range(5)] == [draw() for _ in range(5)]
    if isinstance(generator, np.random.Generator):
        assert copy.spawn(1)[0].random() == generator.spawn(1)[0].random()


def test_memoryviews_stay_memoryviews(notebook: Notebook, far_side: FarSide) -> None:
    notebook.cell("""
        import array
        writable = memoryview(bytearray(b"abc"))
        fixed = memoryview(b"abc")
        table = memoryview(array.array("d", range(6))).cast("B").cast("d", (2, 3))
        large = memoryview(bytearray(100_000))
    """)
    answer = far_side.run(
        notebook.pack("writable", "fixed", "table", "large"),
        """
        writable[0] = large[5] = 1
        answer = [bytes(writable).hex(), fixed.readonly, table.format, list(table.shape), table[1, 2], large.readonly]
        """,
    )
    assert answer == ["016263", True, "d", [2, 3], 5.0, False]
