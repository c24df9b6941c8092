"""The description of a rank's variables: what it says of known types, and that it runs no code of the user's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode

from sgpu_magic.wire import codec
from sgpu_magic.wire.rank import QuestionAnswered
from sgpu_magic.wire.run import Variable
from sgpu_magic.worker.cell.variables import MOST_VARIABLES, describe, describe_variable

calls: list[str] = []
SPECIAL = (
    "__bool__", "__bytes__", "__call__", "__contains__", "__dir__", "__eq__", "__float__", "__format__", "__getattr__",
    "__getattribute__", "__getitem__", "__hash__", "__index__", "__instancecheck__", "__int__", "__iter__", "__len__",
    "__length_hint__", "__lt__", "__reduce_ex__", "__repr__", "__sizeof__", "__str__", "__subclasscheck__",
)  # fmt: skip


def recorded(name: str) -> Any:
    def method(self: object, *arguments: object) -> Any:
        calls.append(name)
        raise AssertionError(f"{name} was called")

    return method


# a metaclass's own special methods would be called for `type(x).__name__`, `isinstance` or sets of types
HOSTILE: dict[str, Any] = {name: recorded(name) for name in SPECIAL}
READ = {name: property(recorded(name)) for name in ("__class__", "__dict__", "shape", "dtype", "device", "nbytes", "T")}
HostileMeta = type("HostileMeta", (type,), HOSTILE | {"__name__": property(recorded("meta name"))})
Hostile: Any = HostileMeta("Hostile", (), HOSTILE | READ)


@pytest.fixture(autouse=True)
def none_called() -> Iterator[None]:
    calls.clear()
    yield
    assert calls == []


def described(value: object) -> Variable:
    return describe_variable("x", value)


def facts(value: object) -> tuple[object, ...]:
    found = described(value)
    return found.type, found.shape, found.dtype, found.device, found.size_bytes


# ---------------------------------------------------------------- known types


@pytest.mark.parametrize(
    ("value", "kind", "length"),
    [
        ([1, 2, 3], "list", 3),
        ({"a": 1}, "dict", 1),
        ((), "tuple", 0),
        ({1, 2}, "set", 2),
        ("words", "str", 5),
        (b"bytes", "bytes", 5),
        (3, "int", None),
        (None, "NoneType", None),
        (range(3), "range", None),
        (describe_variable, "function", None),
        (Variable, "StructMeta", None),
    ],
)
def test_a_builtin_container_has_a_length_and_nothing_else_does(value: object, kind: str, length: int | None):
    found = described(value)
    assert (found.type, found.length, found.shape) == (kind, length, None)


def test_the_size_of_a_list_is_unknown_and_that_of_bytes_is_their_number():
    assert described([b"x" * 1000]).size_bytes is None
    assert described(b"x" * 1000).size_bytes == 1000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(10, 4), ("Tensor", (10, 4), "float32", "cpu", 160)),
        (torch.zeros((), dtype=torch.int64), ("Tensor", (), "int64", "cpu", 8)),
        (torch.nn.Parameter(torch.zeros(3).bfloat16()), ("Parameter", (3,), "bfloat16", "cpu", 6)),
        (torch.zeros(1000, 1000, device="meta"), ("Tensor", (1000, 1000), "float32", "meta", None)),
        (torch.eye(3).to_sparse(), ("Tensor", (3, 3), "float32", "cpu", None)),
        (torch.nn.LazyLinear(3).weight, ("UninitializedParameter", None, "", "", None)),
        (torch.zeros(1).expand(2**61), ("Tensor", (2**61,), "float32", "cpu", None)),
        (np.zeros((2, 3)), ("ndarray", (2, 3), "float64", "cpu", 48)),
        (np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]), ("ndarray", (2,), "structured", "cpu", 24)),
        (np.array(["ab"]), ("ndarray", (1,), "<U2", "cpu", 8)),
        (np.zeros(1, dtype="M8[ns]"), ("ndarray", (1,), "datetime64[ns]", "cpu", 8)),
        (np.ma.array([1, 2], mask=[True, False]), ("MaskedArray", (2,), "int64", "cpu", 16)),
        (pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]}), ("DataFrame", (2, 2), "", "", 32)),
        (pd.DataFrame(), ("DataFrame", (0, 0), "", "", 0)),
        (pd.DataFrame(index=range(3)), ("DataFrame", (3, 0), "", "", 0)),
        (pd.Series([1.0, 2.0], index=["a", "b"]), ("Series", (2,), "float64", "", 16)),
        (pd.Series(["a", "b", "a"], dtype="category"), ("Series", (3,), "category", "", 3)),
        (pd.MultiIndex.from_product([[1, 2], [3, 4]]), ("MultiIndex", (4,), "", "", None)),
        (pd.date_range("2024-01-01", periods=5), ("DatetimeIndex", (5,), "", "", None)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else type(value).__name__,
)
def test_arrays_and_tables(value: object, expected: tuple[object, ...]):
    assert facts(value) == expected


def test_a_table_over_several_indexes_and_types():
    frame = pd.DataFrame(
        {"when": pd.date_range("2024-01-01", periods=4, tz="UTC"), "n": pd.array([1, None, 2, 3], dtype="Int64")},
        index=pd.MultiIndex.from_product([["a", "b"], [0, 1]]),
    )
    found = described(frame)
    assert (found.shape, found.size_bytes) == ((4, 2), 4 * 8 + 4 * 9)
    assert described(frame["when"]).dtype == "datetime64[us, UTC]" or "UTC" in described(frame["when"]).dtype


def test_a_module_has_the_size_of_its_parameters_and_buffers():
    shared = torch.nn.Linear(4, 2)
    model = torch.nn.Sequential(shared, torch.nn.BatchNorm1d(2), shared)
    # 10 of the linear layer, 8 of the norm, and its counter of 8 bytes
    assert facts(model) == ("Sequential", None, "mixed", "cpu", 18 * 4 + 8)
    assert facts(shared)[2:] == ("float32", "cpu", 40)
    assert facts(torch.nn.ReLU()) == ("ReLU", None, "", "", None)
    assert facts(torch.nn.LazyLinear(3)) == ("LazyLinear", None, "", "", None)


def test_a_dtensor_has_the_whole_shape_and_the_local_size(tmp_path: Any):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.zeros(8, 4), mesh, [Replicate()])
        shard = DTensor.from_local(torch.zeros(2, 4), mesh, [Replicate()], shape=torch.Size((8, 4)), stride=(4, 1))
        assert facts(tensor) == ("DTensor", (8, 4), "float32", "cpu", 128)
        assert facts(shard) == ("DTensor", (8, 4), "float32", "cpu", 32)
        assert facts(torch.nn.Parameter(tensor))[1] == (8, 4)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- the user's code


def test_no_special_method_of_an_object_or_its_class_is_called():
    hostile = object.__new__(Hostile)
    found = described(hostile)
    assert (found.type, found.shape, found.length, found.size_bytes) == ("Hostile", None, None, None)
    assert described(Hostile).type == "HostileMeta"


@pytest.mark.parametrize("base", [list, dict, str, bytes, int], ids=lambda base: base.__name__)
def test_no_method_of_a_subclass_of_a_builtin_is_called(base: type):
    methods = {name: method for name, method in HOSTILE.items() if name not in ("__hash__", "__eq__")}
    value = base.__new__(HostileMeta("Own", (base,), methods))
    assert (described(value).type, described(value).length) == ("Own", None)


def test_arrays_of_the_users_class_are_read_through_numpys():
    methods = {name: method for name, method in HOSTILE.items() if name != "__hash__"}
    array = np.ndarray.__new__(type("Own", (np.ndarray,), methods | READ), (3, 2))
    assert facts(array) == ("Own", (3, 2), "float64", "cpu", 48)


def test_a_dtype_of_the_users_is_not_printed():
    meta = type("Meta", (type,), {"__name__": property(recorded("__name__"))})
    scalar = meta("Scalar", (np.void,), {})
    assert facts(np.zeros(2, np.dtype((scalar, 8))))[2] == "|V8"
    assert facts(np.zeros(2, np.dtype((scalar, [("a", "f8")]))))[2] == "structured"


def test_tensors_of_the_users_class_are_read_through_torchs():
    class Own(torch.Tensor):
        shape = property(recorded("shape"))
        device = property(recorded("device"))
        __getattribute__ = recorded("__getattribute__")
        __len__ = recorded("__len__")
        __repr__ = recorded("__repr__")

        @classmethod
        def __torch_function__(cls, *arguments: Any) -> Any:
            recorded("__torch_function__")(cls)

    with torch._C.DisableTorchFunction():
        tensor = torch.Tensor._make_subclass(Own, torch.zeros(2, 2))
    calls.clear()
    assert facts(tensor) == ("Own", (2, 2), "float32", "cpu", 16)


def test_a_mode_that_stays_on_is_not_asked():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, *arguments: Any) -> Any:
            recorded("mode")(self)

    tensor = torch.zeros(3)
    mode = Mode()
    mode.__enter__()
    try:
        found = facts(tensor)
    finally:
        mode.__exit__(None, None, None)
    assert found == ("Tensor", (3,), "float32", "cpu", 12)


def test_a_tensor_that_computes_its_shape_in_python_has_none():
    class Computed(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *arguments: Any, **kwargs: Any) -> Any:
            recorded("__torch_dispatch__")(cls)

    tensor = torch.Tensor._make_wrapper_subclass(
        Computed, (2, 2), dispatch_sizes_strides_policy="sizes", dispatch_device=True
    )
    assert facts(tensor) == ("Computed", None, "", "", None)


def test_tables_of_the_users_class_are_read_through_pandas():
    methods = {name: method for name, method in HOSTILE.items() if name not in ("__hash__", "__getattr__")}
    methods |= {name: property(recorded(name)) for name in ("index", "columns", "_mgr", "axes", "empty", "size")}
    for base, expected in ((pd.DataFrame, (2, 1)), (pd.Series, (2,))):
        value = object.__new__(type("Own", (base,), methods | READ))
        plain = pd.DataFrame({"a": [1, 2]}) if base is pd.DataFrame else pd.Series([1, 2])
        attributes: Any = next(vars(each)["__dict__"] for each in base.__mro__ if "__dict__" in vars(each))
        attributes.__get__(value)["_mgr"] = plain._mgr
        assert facts(value)[:2] == ("Own", expected)
        assert described(value).size_bytes == 16


def test_a_column_or_index_of_the_users_class_is_not_measured():
    class Column(pd.api.extensions.ExtensionArray):
        dtype = pd.Series([1]).dtype
        ndim = 1
        shape = (2,)

        def __len__(self) -> int:
            return 2 if is_making else recorded("__len__")(self)

        @property
        def nbytes(self) -> int:
            return recorded("nbytes")(self)

        def view(self, dtype: Any = None) -> Any:
            return self

        def copy(self) -> Any:
            return self

    is_making = True
    series = pd.Series(Column())
    is_making = False
    assert facts(series) == ("Series", (2,), "", "", None)


def test_an_index_over_an_array_of_the_users_is_not_measured():
    series = pd.Series([1.0, 2.0], index=["a", "b"])
    series.index._data = object.__new__(Hostile)
    assert facts(series) == ("Series", None, "float64", "", 16)


def test_a_module_of_the_users_is_read_through_torchs():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(5))

    model = Own()
    for name in ("__getattribute__", "__getattr__", "__len__", "parameters", "named_parameters", "buffers"):
        setattr(Own, name, recorded(name))
    assert facts(model) == ("Own", None, "float32", "cpu", 20)


def test_a_table_that_is_half_built_is_no_harm():
    assert facts(object.__new__(pd.DataFrame)) == ("DataFrame", None, "", "", None)
    assert facts(torch.nn.Module.__new__(torch.nn.Linear)) == ("Linear", None, "", "", None)


def test_a_library_that_is_not_the_real_one(monkeypatch: pytest.MonkeyPatch):
    fake = ModuleType("pandas")
    fake.DataFrame = "no class"  # pyright: ignore[reportAttributeAccessIssue]
    frame = pd.DataFrame({"a": [1]})
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert described(frame).shape is None


# ---------------------------------------------------------------- which names


def listed(namespace: dict[str, Any], *patterns: str, ordinary: tuple[str, ...] | None = None) -> list[str]:
    answer = describe(namespace, [*namespace] if ordinary is None else ordinary, patterns)
    return [variable.name for variable in answer.variables]


def test_names_are_sorted_and_hidden_ones_left_out_unless_they_are_asked_for():
    namespace = {"b": 1, "a": 2, "_own": 3, "torch": torch, "rank": 0, "loss": 4, "loss_sum": 5}
    set_by_cells = ("b", "a", "_own", "torch", "loss", "loss_sum")
    assert listed(namespace, ordinary=set_by_cells) == ["a", "b", "loss", "loss_sum"]
    assert listed(namespace, "loss*", ordinary=set_by_cells) == ["loss", "loss_sum"]
    assert listed(namespace, "loss", "nope", "[ab]", ordinary=set_by_cells) == ["a", "b", "loss"]
    assert listed(namespace, "_*", ordinary=set_by_cells) == ["_own"]
    assert listed(namespace, "torch", "rank", "_own", ordinary=set_by_cells) == ["_own", "rank", "torch"]
    assert listed(namespace, "t*", "r*", ordinary=set_by_cells) == []


def test_an_answer_is_bounded_and_can_be_sent():
    namespace: dict[str, Any] = {f"x{number:04}": number for number in range(MOST_VARIABLES + 20)}
    namespace |= {"a\ud800" + "long" * 10_000: 1, "b": object.__new__(HostileMeta("T" * 10_000, (), HOSTILE))}
    answer = describe(namespace, [*namespace], ())
    assert (len(answer.variables), answer.left_out) == (MOST_VARIABLES, 22)
    data = codec.encode(QuestionAnswered(request=1, answer=answer))
    assert len(data) < 100_000
    assert codec.from_rank.decode(data) == QuestionAnswered(request=1, answer=answer)


def test_names_that_are_no_text_are_ignored():
    namespace: Any = {3: "three", "a": 1}
    assert listed(namespace) == ["a"]
