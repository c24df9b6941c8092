"""A run has one description: which parts a session changes, and which it never may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sgpu_magic.errors import UsageError
from sgpu_magic.options.option_records import CellOptions, Devices, RunOptions, check_call, check_cell
from sgpu_magic.payload.call import FunctionCall
from sgpu_magic.runs.submit.cell_source import check_outputs, pack_cell, read_cell
from sgpu_magic.runs.submit.pack_call import pack_call
from sgpu_magic.runs.submit.spec import describe
from sgpu_magic.runs.submit.target import ResolvedTarget
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.run import OutputName, RunSpec

CONTEXT = cast("Any", SimpleNamespace(shell=None, namespace={"x": 1, "y": 2}))
POOL = cast("Any", SimpleNamespace(name="lab"))
FOUND = ResolvedTarget(POOL, Placement(ranks=2, device_type="a10"), ("it goes to lab",))
SESSION = cast(
    "Any",
    SimpleNamespace(
        run_id="0123456789abcdef",
        name="main",
        ranks=2,
        device_type="a10",
        placement=FOUND.placement,
        pool=POOL,
        variables={"B": "2"},
        environment_with=lambda environment: environment,
    ),
)


def test_a_session_changes_only_whose_ranks_and_what_is_shipped():
    options = RunOptions(variables={"A": "1"}, timeout_s=5.0, only=(1,), reload=True, outputs=(OutputName("z"),))
    cell = read_cell(CONTEXT, "", "z = x + y", options)
    own = describe(CONTEXT, pack_cell(CONTEXT, cell, RunOptions(outputs=options.outputs)), options, FOUND)
    code = pack_cell(CONTEXT, cell, options, names=("x",), stay=frozenset("y"), not_own="y", notes=["`y` is theirs"])
    inside = describe(CONTEXT, code, options, FOUND, SESSION)
    changed = {name for name in RunSpec.__struct_fields__ if getattr(own.spec, name) != getattr(inside.spec, name)}
    assert changed == {"run_id", "session", "session_name", "reload", "env_names", "shipped", "parameters"}
    assert (own.spec.shipped.names, inside.spec.shipped.names) == (("x", "y"), ("x",))
    assert inside.spec.shipped.notes == ("it goes to lab", "`y` is theirs")
    assert inside.spec.parameters == (("x", "1"),)
    assert inside.spec.in_session
    assert (inside.environ["A"], inside.environ["B"], inside.given) == ("1", "2", {"A", "B"})
    assert "B" not in own.environ
    assert own.pool == inside.pool == "lab"


def test_a_call_returns_each_rank_and_a_driver_one():
    def train(lr: float) -> float:
        return lr

    for ray, all_ranks in ((False, True), (True, False)):
        code = pack_call(CONTEXT, FunctionCall(train, (0.5,), {}), RunOptions(ray=ray))
        assert (code.kind, code.name, code.parameters) == (RunKind.CALL, "train", (("lr", "0.5"),))
        assert [output.all_ranks for output in code.outputs] == [all_ranks]


def test_values_of_env_are_not_in_the_line_that_is_written_down():
    cell = read_cell(CONTEXT, "%%distributed --env TOKEN=hush", "pass", RunOptions())
    assert cell.source.magic_line == "%%distributed --env TOKEN=***"


def test_what_a_cell_never_sets_can_not_be_brought_back():
    cell = read_cell(CONTEXT, "", "z = x", RunOptions())
    check_outputs(cell, [OutputName("z"), OutputName("x")])
    with pytest.raises(UsageError, match="never sets"):
        check_outputs(cell, [OutputName("w")])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (CellOptions(devices=Devices(ranks=4)), "--gpus 4"),
        (CellOptions(devices=Devices(ranks=1)), "--gpus 1"),
        (CellOptions(devices=Devices(ranks=3), fresh=True), "--gpus 3"),
        (CellOptions(devices=Devices(device_type="h100")), "--type h100"),
        (CellOptions(devices=Devices(allow_busy=True)), "--allow-busy"),
        (CellOptions(devices=Devices(nodes=2)), "--nodes"),
        (CellOptions(pool="other"), "--pool other"),
        (CellOptions(max_cost=1.0), "has no cost of its own"),
        (CellOptions(detach=True), "--detach"),
        (CellOptions(retries=1), "--retries"),
    ],
)
def test_a_session_is_what_it_is(options: CellOptions, text: str):
    with pytest.raises(UsageError, match=text):
        check_cell(SESSION, options, "%%distributed")


def test_what_a_session_has_may_be_asked_for():
    for options in (
        CellOptions(),
        CellOptions(devices=Devices(2, "a10"), pool="lab"),
        CellOptions(devices=Devices(ranks=1, device_type="any"), fresh=True, retries=2),
    ):
        check_cell(SESSION, options, "%%distributed")
    check_call(SESSION, RunOptions(devices=Devices(2)))
    with pytest.raises(UsageError, match="Leave gpus and gpu_type out"):
        check_call(SESSION, RunOptions(devices=Devices(1)))
    with pytest.raises(UsageError, match="--ranks names ranks of a session"):
        check_cell(None, CellOptions(selected=(0, 3)), "%%distributed")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("def train(lr): ...\ntrain(0.1)", "train"),
        ("class Net: ...\ndef fit(net): ...\nfit(net := Net())", "Net"),
        ("async def serve(): ...\nawait serve()", "serve"),
        # a handler, a thread's function and what a later cell uses are not called here
        ("def save(*_): ...\nsignal.signal(signal.SIGTERM, save)\ndef train(): ...\ntrain()", "train"),
        ("def save(*_): ...\nsignal.signal(signal.SIGTERM, save)\nx + y", "def save(*_): ..."),
        ("import torch\nclass Net: ...\ndef later(): ...", "Net"),
        ("x + y", "x + y"),
        ("# Add up\nx + y", "Add up"),
    ],
)
def test_an_unnamed_cell_is_named_after_what_it_is_about(body: str, name: str):
    options = RunOptions(exclude=("signal", "net", "train"))
    cell = read_cell(CONTEXT, "", body, options)
    assert describe(CONTEXT, pack_cell(CONTEXT, cell, options), options, FOUND).spec.name == name
