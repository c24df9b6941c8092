"""The devices' use in the last ten minutes, as `%sgpu_status` draws it."""

from __future__ import annotations

from msgspec.structs import replace
from status_rows import pool_status, run_summary

from sgpu_magic.views.history_table import curve_text, recent_runs, whole_span
from sgpu_magic.views.pool_tables import status_html, status_text
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import DeviceHistory, PoolStatus

GB = 10**9
DEVICES = (
    Device(uuid="GPU-0", type="a10", index=0, memory_bytes=24 * GB, used_bytes=12 * GB),
    Device(uuid="GPU-1", type="a10", index=1, memory_bytes=24 * GB),
)
RUN = run_summary(ranks=1, submitted_at=100.0, uuids=("GPU-0",), notebook="/home/ann/train.ipynb")


def status(*history: DeviceHistory) -> PoolStatus:
    return pool_status(RUN, inventory=Inventory(host="box", devices=DEVICES), history=history)


def test_a_curve_has_twenty_blocks_and_spaces_for_gaps() -> None:
    assert curve_text([100] * 60) == "█" * 20
    assert curve_text([0] * 30 + [None] * 15 + [50] * 15) == "▁" * 10 + " " * 5 + "▅" * 5
    # what is known ends now
    assert curve_text([13, 13, 13]) == " " * 19 + "▂"
    assert curve_text([None, 100, None]) == " " * 19 + "█"
    assert curve_text([]) == " " * 20
    assert whole_span([1]) == [*[None] * 59, 1]


def test_status_has_a_curve_for_each_device_with_a_history() -> None:
    busy = DeviceHistory(uuid="GPU-0", type="a10", utilization_pct=(60, 100), memory_pct=(40, 50))
    idle = DeviceHistory(uuid="GPU-1", type="a10", utilization_pct=(0, 0, None, None), memory_pct=(3, 3, None, None))
    lines = status_text(status(busy, idle), now=144.0).splitlines()
    at = next(number for number, line in enumerate(lines) if "use in 10 minutes" in line)
    assert [line.split() for line in lines[at : at + 3]] == [
        ["device", "use", "in", "10", "minutes", "average", "memory", "now"],
        ["A10", "·", "0", "▇", "80", "%", "12", "of", "24", "GB"],
        ["A10", "·", "1", "▁▁", "0", "%"],
    ]
    assert max(map(len, lines[at : at + 3])) <= 80
    # nothing without a history
    assert "10 minutes" not in status_text(status(), now=144.0)
    assert "10 minutes" not in status_html(status(), now=144.0)


def test_types_have_a_mean() -> None:
    text = status_text(status(DeviceHistory(type="a10", utilization_pct=(40,), memory_pct=(25,))), now=144.0)
    assert [line.split() for line in text.splitlines() if "mean" in line] == [
        ["A10,", "mean", "▄", "40", "%", "25", "%"],
    ]


def test_the_html_form_has_svg_that_says_what_it_shows() -> None:
    history = DeviceHistory(uuid="GPU-0", type="a10", utilization_pct=(60, 100), memory_pct=(40, 50))
    html = status_html(status(history), now=144.0)
    assert html.count("<svg") == 1
    title = "10 minutes: use 80 % on average, memory 12 of 24 GB now; held by 7f3a train.ipynb"
    assert f"<title>{title}</title>" in html
    # other cells are still escaped
    hostile = replace(RUN, name="<script>", notebook="<b>.ipynb")
    html = status_html(replace(status(history), runs=(hostile,)), now=144.0)
    assert "<script>" not in html
    assert "<b>.ipynb" not in html


def test_the_runs_of_the_last_ten_minutes_are_named_newest_first() -> None:
    ended = replace(RUN, run_id="aaaa0000", submitted_at=50.0, state=RunState.SUCCEEDED, ended_at=700.0)
    old = replace(ended, run_id="bbbb0000", ended_at=399.0)
    cell = replace(RUN, run_id="cccc0000", session="7f3a0000")
    anonymous = replace(RUN, run_id="dddd0000", submitted_at=60.0, notebook="", uuids=("GPU-0", "GPU-1"))
    assert recent_runs([old, ended, cell, RUN, anonymous], 1000.0) == {
        "GPU-0": ("7f3a train.ipynb", "dddd", "aaaa train.ipynb"),
        "GPU-1": ("dddd",),
    }
