"""A session computes with the notebook's current values: kinds of values, sizes, and ways to change them.

Each row changes one value in one way. The next cell that reads it takes it along, and the cell after that does not.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import functools
import io
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_modules import torch

from sgpu_magic.payload.memory_digests import TRACKED_FROM, MemoryDigests, digest_of, shared_digests
from sgpu_magic.runs.sessions.namespace_sync import Effects, NamespaceTracker

RANKS = (0, 1)
SMALL, LARGE = 1000, 3 * TRACKED_FROM


class Notebook:
    """A notebook's namespace with the record of what a session's ranks have. Nothing is sent anywhere."""

    def __init__(self, **values: Any) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__", **values}
        self.shipping = NamespaceTracker()

    def sends(self, *names: str) -> set[str]:
        """Run a cell in the session that reads these names of the notebook; return the names that are sent."""
        plan = self.shipping.plan(names, self.namespace, RANKS)
        self.shipping.record_sent(plan.names, plan.prints, RANKS)
        self.shipping.record_ended(Effects(), plan, self.namespace, succeeded=True, names_of=lambda _: frozenset())
        return set(plan.names)


class Plain:
    def __init__(self, size: int) -> None:
        self.inner = {"weights": np.zeros(size // 8), "tags": ["a"]}


class Slotted:
    __slots__ = ("values",)

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size // 8)


class Reduced:
    """Pickled by its own `__reduce__`, as a copy."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)

    def __reduce__(self) -> Any:
        return Reduced, (bytes(self.content),)


@dataclasses.dataclass
class Record:
    values: list[Any]


def texts(size: int) -> list[str]:
    return [f"row {number:09} of the table" for number in range(size // 28)]


def closure(size: int) -> Callable[[], Any]:
    values = np.zeros(size // 8)

    def read() -> Any:
        return values

    return read


def by_memset(at: Callable[[Any], int]) -> Callable[[Any], object]:
    return lambda value: ctypes.memset(at(value), 7, 1)


def in_a_thread(change: Callable[[Any], object]) -> Callable[[Any], object]:
    def begin(value: Any) -> None:
        thread = threading.Thread(target=change, args=(value,))
        thread.start()
        thread.join()

    return begin


def by_system_call(value: np.ndarray) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"\x07")
    middle = value.nbytes // 2
    os.readv(reading, [memoryview(value.view(np.uint8))[middle : middle + 1]])
    os.close(reading)
    os.close(writing)


def middle(value: Any) -> int:
    return len(value) // 2 + 1


def put(value: Any) -> None:
    value[middle(value)] = 7


LISTS: dict[str, Any] = {
    "append": lambda v: v.append("new"),
    "item": put,
    "slice": lambda v: v.__setitem__(slice(2, 4), ["x"]),
    "delete": lambda v: v.pop(),
    "sort": lambda v: v.sort(reverse=True),
}
ARRAYS: dict[str, Any] = {
    "item": put,
    "last": lambda v: v.__setitem__(-1, 7),
    "slice": lambda v: v[3:5].fill(7),
    "mask": lambda v: v.__setitem__(np.arange(len(v)) == 5, 7),
    "view": lambda v: put(v[1:]),
    "out": lambda v: np.add(v, 1, out=v),
    "memoryview": lambda v: put(memoryview(v)),
    "memset": by_memset(lambda v: v.ctypes.data + v.nbytes // 2),
    "thread": in_a_thread(put),
    "system call": by_system_call,
    "torch": lambda v: torch.from_numpy(v).add_(1),
    "resize": lambda v: v.resize(len(v) + 1, refcheck=False),
}
TENSORS: dict[str, Any] = {
    "item": put,
    "in place": lambda v: v.add_(1),
    "view": lambda v: v.view(-1)[3:].fill_(7),
    "data": lambda v: v.data.mul_(2).add_(1),
    "numpy": lambda v: put(v.numpy()),
    "memset": by_memset(lambda v: v.data_ptr() + v.nbytes // 2),
    "requires_grad": lambda v: v.requires_grad_(),
}
KINDS: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
    "list of numbers": (lambda size: list(range(size // 5)), LISTS | {"append": lambda v: v.append(1), "slice": None}),
    "list of texts": (texts, LISTS | {"item": lambda v: v.__setitem__(middle(v), "x")}),
    "dict": (
        lambda size: dict.fromkeys(texts(size), 0),
        {"item": lambda v: v.__setitem__("new", 1), "value": lambda v: v.update({"row 000000003 of the table": 1})},
    ),
    "set": (lambda size: set(texts(size)), {"add": lambda v: v.add("x"), "remove": lambda v: v.pop()}),
    "deque": (lambda size: collections.deque(texts(size)), {"rotate": lambda v: v.rotate(1)}),
    "nested": (
        lambda size: ({"rows": [texts(size)]},),
        {"item": lambda v: v[0]["rows"][0].__setitem__(20, "x"), "append": lambda v: v[0]["rows"].append(1)},
    ),
    "bytes": (lambda size: [bytes(size)], {"rebind": lambda v: v.__setitem__(0, v[0][:-1] + b"x")}),
    "bytearray": (
        bytearray,
        {"item": put, "memoryview": lambda v: put(memoryview(v)), "append": lambda v: v.append(1)},
    ),
    "BytesIO": (lambda size: io.BytesIO(bytes(size)), {"buffer": lambda v: put(v.getbuffer())}),
    "array.array": (
        lambda size: array.array("d", bytes(size // 8 * 8)),
        {"item": put, "append": lambda v: v.append(1)},
    ),
    "numpy array": (lambda size: np.zeros(size // 8), ARRAYS),
    "numpy array of columns": (
        lambda size: np.zeros((size // 80, 10), order="F"),
        {"item": lambda v: v.__setitem__((3, 7), 1), "column": lambda v: v[:, 4].fill(1)},
    ),
    "numpy slice": (lambda size: np.zeros(size // 4)[::2], {"item": put, "base": lambda v: v.base.__setitem__(8, 1)}),
    "read-only view": (
        lambda size: np.broadcast_to(np.zeros(size // 8), (1, size // 8)),
        {"base": lambda v: v.base.__setitem__(5, 1) if v.base.flags.writeable else v.base.base.__setitem__(5, 1)},
    ),
    "numpy dates": (
        lambda size: np.zeros(size // 8, "M8[s]"),
        {"item": lambda v: v.__setitem__(7, np.datetime64(1, "s")), "view": lambda v: put(v.view("i8"))},
    ),
    "numpy records": (lambda size: np.zeros(size // 12, [("a", "f8"), ("b", "i4")]), {"field": lambda v: put(v["b"])}),
    "numpy objects": (
        lambda size: np.array([*texts(size), [1]], dtype=object),
        {"item": put, "inside": lambda v: v[-1].append(2)},
    ),
    "tensor": (lambda size: torch.zeros(size // 4), TENSORS),
    "bfloat16": (lambda size: torch.zeros(size // 2, dtype=torch.bfloat16), {"item": put}),
    "slice of a tensor": (
        lambda size: torch.zeros(size // 2)[10:20],
        {"item": put, "storage": lambda v: v.untyped_storage().fill_(1)},
    ),
    "parameter": (
        lambda size: torch.nn.Parameter(torch.zeros(size // 4)),
        {"data": lambda v: put(v.data), "frozen": lambda v: v.requires_grad_(False)},
    ),
    "module": (
        lambda size: torch.nn.Linear(size // 40, 10),
        {"weight": lambda v: v.weight.data.add_(1), "mode": lambda v: v.eval(), "bias": lambda v: put(v.bias.data)},
    ),
    "sparse tensor": (
        lambda size: torch.eye(size // 12).to_sparse() if size < LARGE else torch.eye(1000).to_sparse(),
        {"values": lambda v: put(v._values())},
    ),
    "DataFrame": (
        lambda size: pd.DataFrame(np.zeros((size // 40, 5)), columns=list("abcde")),
        {
            "column": lambda v: v.__setitem__("b", 1.0),
            "loc": lambda v: v.loc.__setitem__((7, "b"), 1.0),
            "iat": lambda v: v.iat.__setitem__((8, 2), 1.0),
            "new column": lambda v: v.insert(0, "f", 1),
            "drop": lambda v: v.drop(columns="b", inplace=True),
            "name": lambda v: v.rename(columns={"a": "z"}, inplace=True),
            "attrs": lambda v: v.attrs.update(unit="m"),
        },
    ),
    "DataFrame of texts": (
        lambda size: pd.DataFrame({"s": texts(size), "n": 0}),
        {"loc": lambda v: v.loc.__setitem__((9, "s"), "x"), "column": lambda v: v.__setitem__("n", 1)},
    ),
    "Series": (lambda size: pd.Series(np.zeros(size // 8)), {"item": lambda v: v.__setitem__(9, 1)}),
    "categories": (
        lambda size: pd.Series(["a", "b"] * (size // 2)).astype("category"),
        {"item": lambda v: v.__setitem__(9, "a")},
    ),
    "Arrow over numpy": (
        lambda size: (
            base := np.zeros(size // 8),
            pa.Array.from_buffers(pa.float64(), len(base), [None, pa.py_buffer(base)]),
        ),
        {"base": lambda v: put(v[0])},
    ),
    "sparse matrix": (lambda size: scipy.sparse.eye(size // 12, format="csr"), {"data": lambda v: put(v.data)}),
    "attributes": (
        Plain,
        {
            "array": lambda v: put(v.inner["weights"]),
            "list": lambda v: v.inner["tags"].append("b"),
            "new": lambda v: setattr(v, "extra", 1),
        },
    ),
    "slots": (Slotted, {"array": lambda v: put(v.values)}),
    "own __reduce__": (lambda size: Reduced(bytes(size)), {"content": lambda v: put(v.content)}),
    "dataclass": (lambda size: Record(texts(size)), {"list": lambda v: v.values.append(1)}),
    "partial": (lambda size: functools.partial(max, texts(size)), {"argument": lambda v: v.args[0].append("x")}),
    "closure": (closure, {"cell": lambda v: put(v())}),
    "random state": (lambda _: np.random.default_rng(0), {"draw": lambda v: v.random()}),
    "random.Random": (lambda _: random.Random(0), {"draw": lambda v: v.random()}),
}
ROWS = [
    pytest.param(make, change, size, id=f"{kind} of {size}: {way}")
    for kind, (make, ways) in KINDS.items()
    for size in (SMALL, LARGE)
    for way, change in ways.items()
    if change is not None
]


@pytest.mark.parametrize(("make", "change", "size"), ROWS)
def test_a_change_reaches_the_ranks(make: Callable[[int], Any], change: Callable[[Any], object], size: int):
    notebook = Notebook(value=make(size), step=0)
    assert notebook.sends("value") == {"value"}
    # a second time, so that the memory's digests are used
    assert notebook.sends("value") == set()
    assert notebook.sends("value", "step") == {"step"}
    change(notebook.namespace["value"])
    assert notebook.sends("value") == {"value"}
    assert notebook.sends("value") == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(lambda: texts(100_000_000), lambda v: v.append("new"), id="a list"),
        pytest.param(lambda: np.zeros(20_000_000), put, id="an array"),
        pytest.param(
            lambda: pd.DataFrame(np.zeros((10_000_000, 2))), lambda v: v.iat.__setitem__((9, 1), 1), id="a frame"
        ),
        pytest.param(lambda: torch.zeros(40_000_000), lambda v: put(v.numpy()), id="a tensor"),
        pytest.param(lambda: {"rows": [bytes(100_000_000)]}, lambda v: v["rows"].append(1), id="nested bytes"),
    ],
)
def test_a_change_of_a_value_of_100_megabytes_reaches_the_ranks(make: Callable[[], Any], change: Any):
    test_a_change_reaches_the_ranks(lambda _: make(), change, 0)


# ---------------------------------------------------------------- what functions read


def test_globals_attributes_and_defaults_of_a_notebooks_function(monkeypatch: pytest.MonkeyPatch):
    notebook = Notebook()
    exec(
        "table = {'a': [1]}\nclass Net:\n    layers = [1]\n    def f(self):\n        return table\n"
        "def train(seen=[]):\n    return Net, seen\ntrain.calls = []",
        notebook.namespace,
    )
    monkeypatch.setattr("__main__.Net", notebook.namespace["Net"], raising=False)
    assert notebook.sends("train") == {"train", "Net", "table"}
    assert notebook.sends("train") == set()
    notebook.namespace["table"]["a"].append(2)
    assert notebook.sends("train") == {"table"}
    notebook.namespace["train"].__defaults__[0].append(2)
    assert "train" in notebook.sends("train")
    notebook.namespace["train"].calls.append(2)
    assert "train" in notebook.sends("train")
    notebook.namespace["Net"].layers.append(2)
    assert "Net" in notebook.sends("train")
    notebook.namespace["Net"].f = lambda self: 1
    assert "Net" in notebook.sends("train")
    assert notebook.sends("train") == set()


# ---------------------------------------------------------------- memory


@pytest.fixture
def memory() -> MemoryDigests:
    found = shared_digests()
    found.digests_of([memoryview(bytes(TRACKED_FROM))])
    return found


def pages(count: int) -> np.ndarray:
    """Separately mapped memory, as numpy has for large arrays."""
    return np.zeros(TRACKED_FROM * 2 + count * 4096, np.uint8)


def test_what_is_known_about_memory_is_what_hashing_finds(memory: MemoryDigests):
    """Any sequence of writes to overlapping buffers, with digests taken in any order."""
    whole = pages(64)
    size = len(whole)
    begins = (0, 1, 5000, 40960)
    views = [memoryview(whole)[begin : begin + TRACKED_FROM + 8192 * number] for number, begin in enumerate(begins)]
    views.append(memoryview(whole))

    @settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("write"), st.integers(0, size - 1)),
                st.tuples(st.just("digest"), st.integers(0, len(views) - 1)),
                st.tuples(st.just("all"), st.just(0)),
            ),
            min_size=4,
            max_size=30,
        )
    )
    def holds(steps: list[tuple[str, int]]) -> None:
        for what, at in steps:
            if what == "write":
                whole[at] += 1
            else:
                chosen = views if what == "all" else [views[at]]
                assert memory.digests_of(chosen) == [digest_of(view) for view in chosen]

    holds()


def test_memory_that_is_written_while_it_is_hashed(memory: MemoryDigests):
    """The digest may be of either content, but the next one is of the last content."""
    value = np.zeros(64_000_000, np.uint8)
    view = memoryview(value)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            value[np.random.randint(len(value))] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            memory.digests_of([view])
    finally:
        stop.set()
        writer.join()
    assert memory.digests_of([view]) == [digest_of(view)]
    assert memory.digests_of([view]) == [digest_of(view)]


def test_memory_that_was_freed_and_allocated_again(memory: MemoryDigests):
    for number in range(20):
        value = np.full(TRACKED_FROM * 3, number, np.uint8)
        assert memory.digests_of([memoryview(value)]) == [digest_of(memoryview(value))]
        del value


def test_a_forked_child_does_not_use_what_its_parent_knows(memory: MemoryDigests):
    value = pages(0)
    # an earlier test may have had other content here: tracking starts once the content was the same twice
    before = [memory.digests_of([memoryview(value)]) for _ in range(3)][-1]
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        value[5] = 1
        same = memory.digests_of([memoryview(value)]) == before
        os.write(writing, b"same" if same else b"other")
        os._exit(0)
    assert os.read(reading, 10) == b"other"
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert memory.digests_of([memoryview(value)]) == before
    value[7] = 1
    assert memory.digests_of([memoryview(value)]) != before
