"""The saved output of a run: it matches the live view, and renderers that strip most of it can still show it."""

from __future__ import annotations

import json
import os
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from stories import CELL, FORMS, STUCK, Run, released, render_text, result, value_error

from sgpu_magic.config import host_name
from sgpu_magic.views.bundle import RUN_MIME, interrupted_bundle, mime_bundle, run_record
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html import render_html
from sgpu_magic.views.html_style import HEIGHT, WIDTH, sparkline
from sgpu_magic.views.output import TextSegment, segments
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.rank_events import Failure, RankSample
from sgpu_magic.wire.run import Shipped

GOLDEN = Path(__file__).parents[2] / "golden"
DIRECTORY = "/home/anna/.local/state/sgpu-magic/box/runs/7f3a90c1"
LABELS = tuple(f"A10 · {rank}" for rank in range(4))


def measured() -> Run:
    run = Run(outputs=("model", "history")).start("a10", labels=LABELS)
    run.view.directory = DIRECTORY
    for step in range(3):
        for rank in range(4):
            run.say(rank, f"step {step}  \x1b[32mloss 0.{9 - step}\x1b[0m\n")
    run.show(2, text_plain="plot")
    run.sample(190, idle_ranks=(3,))
    return run.end(seconds=190.0, results=tuple(result(rank, 1200) for rank in range(4)))


def failed_measured() -> Run:
    run = Run().start("a10", labels=LABELS).say(0, "epoch 1\n").say(1, "epoch 1\n").sample(9)
    run.view.directory = DIRECTORY
    return run.end(RunState.FAILED, 9.2, value_error(), released(0, 2, 3, where="all_reduce #118"))


def timed_out_measured() -> Run:
    run = Run(cell=CELL).start("a10", labels=LABELS).say(0, "epoch 1\n").sample(90, idle_ranks=(1, 2))
    failure = Failure(kind=FailureKind.TIMEOUT, message="")
    return run.end(RunState.TIMED_OUT, 90, failure, stacks=STUCK)


def measured_on_cpu() -> Run:
    run = Run().start().say(0, "epoch 1\n").sample(12, kind="cpu")
    return run.end()


STORIES = {
    story.__name__: story
    for story in (
        measured,
        failed_measured,
        timed_out_measured,
        measured_on_cpu,
        FORMS["failed"],
        FORMS["gapped"],
        FORMS["stalled"],
        FORMS["logged_metrics"],
    )
}


class Stripped(HTMLParser):
    """Return the text lines that remain in a renderer with few tags and no attributes.

    The tags are those of GitHub's renderer and JupyterLab's that both keep; of others the text stays, but for style
    sheets, which both drop.
    """

    KEPT = {"div", "b", "pre", "span", "details", "summary", "table", "tr", "td", "th", "code"}
    LINES = {"div", "pre", "details", "summary", "tr"}

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script", "its content would vanish"
        self._in_style = tag == "style"
        self.text += "\n" if tag in self.LINES else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
        self.text += "\n" if tag in self.LINES else ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self._in_style else data


def stripped(html: str) -> str:
    reader = Stripped()
    reader.feed(html)
    return "\n".join(line.rstrip() for line in reader.text.splitlines() if line.strip())


@pytest.mark.parametrize("name", STORIES)
def test_it_reads_in_order_without_attributes_and_unknown_tags(name: str) -> None:
    text = stripped(render_html(STORIES[name]().view)) + "\n"
    text = re.sub(r"· \d+ h \d\d min", "· 3 s", text) if name == "stalled" else text
    text = text.replace(host_name(), "HOST")
    file = GOLDEN / f"stripped_{name}.txt"
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_the_same_picture_from_top_to_bottom() -> None:
    text = stripped(render_html(measured().view))
    places = [
        text.index(words)
        for words in (
            "✓ succeeded",
            "GPUs busy 68 %",
            "rank 3's GPU was under 5 % for 3 min 10 s",
            "[0] step 0  loss 0.9",
            "[3] step 2  loss 0.7",
            "rank 0 · 90 % · 18.2 GB · 3 lines (GPU: 90 % on average, 95 % at most)",
            "rank 3 · 2 % · 18.2 GB · 3 lines",
            "returned model, history",
        )
    ]
    assert places == sorted(places)
    assert text.count("step 2  loss 0.7") == 12, "once in the output, in its rank's row, and behind that"
    for words in ("on A10 · 2", "1 display", "power: 200 W on average, 210 W at most", "of 24.0 GB"):
        assert words in text
    assert "whole log: !sgpu logs 7f3a --rank 2" in text
    assert "succeeded in 3 min 10 s · GPUs busy 68 % · returned" in render_text(measured().view)
    assert "note: rank 3's GPU was under 5 % for 3 min 10 s" in render_text(measured().view)


def test_the_failure_comes_first_and_its_rank_is_marked() -> None:
    text = stripped(render_html(failed_measured().view))
    assert text.index("✕ failed train_digits") < text.index("ValueError on rank 1") < text.index("[0] epoch 1")
    assert "rank 1 · ✕ failed · " in text
    assert "rank 0 · released · " in text


@pytest.mark.parametrize("name", ["succeeded", "queued", "running", "cancelled"])
def test_ranks_of_which_nothing_is_to_be_said_are_not_listed(name: str) -> None:
    assert "<details" not in render_html(FORMS[name]().view)


def test_one_rank_is_not_listed() -> None:
    assert "<details" not in render_html(Run(ranks=1).start("a10").say(0, "x\n" * 50).sample(90).end().view)


def test_many_lines_are_reason_enough_to_list_the_ranks() -> None:
    run = Run(ranks=2).start()
    for step in range(30):
        run.say(step % 2, f"step {step}\n")
    text = stripped(render_html(run.end().view))
    assert "rank 1 · 15 lines" in text
    assert "whole log: !sgpu logs 7f3a --rank 1" in text


def test_only_what_its_events_say_whole_is_replaced_by_a_view_of_them() -> None:
    def is_whole(view: RunView, **context: bool) -> object:
        record = mime_bundle(view, TextSegment((), 0), **context)[RUN_MIME]
        assert isinstance(record, dict)
        return record["whole"]

    view = Run(ranks=2).start().end().view
    assert is_whole(view)
    # displays of ranks are outputs of their own, between the segments
    assert not is_whole(view, first=False)
    view.remark("the kernel was restarted; %sgpu_attach 7f3a shows run 7f3a again")
    assert not is_whole(view)


# ------------------------------------------------------------ bounds


@pytest.mark.parametrize("ranks", [16, 64])
def test_it_stays_within_its_limit_and_says_where_the_rest_is(ranks: int) -> None:
    run = Run(ranks=ranks).start("a10", labels=tuple(f"A10 · {rank}" for rank in range(ranks)))
    run.view.directory = DIRECTORY
    for step in range(200):
        for rank in range(ranks):
            run.say(rank, f"step {step:04d}  " + "é<" * 40 + "\n")
        if step % 10 == 0:
            run.show(step % ranks, text_plain=f"plot {step}")
    run.sample(300, idle_ranks=(4,))
    parts = segments(run.end().view)
    (lines,) = [part for part in parts if isinstance(part, TextSegment)]
    bundle = mime_bundle(run.view, lines)
    html, plain = str(bundle["text/html"]), str(bundle["text/plain"])
    assert 60_000 < len(html.encode()) <= 75_000
    assert len(html.encode()) + len(plain.encode()) <= 100_000
    assert html.count("<details style") == ranks
    # the ranks that need attention are seen at once, the others after a click
    before, _, after = html.partition(f"{ranks - 1} other ranks</summary>")
    assert [part.count("<details style") for part in (before, after)] == [1, ranks - 1]
    text = stripped(html)
    # with this many ranks there is no room for the measurements
    assert ("power: 200 W on average" in text) == (ranks == 16)
    assert f"lines of {ranks} ranks in the run's log: sgpu logs 7f3a · {DIRECTORY}/rank-*.log" in text
    assert f"lines of {ranks} ranks in the run's log: sgpu logs 7f3a · {DIRECTORY}/rank-*.log" in plain
    assert f"whole log: !sgpu logs 7f3a --rank {ranks - 1}" in text


def printed(lines: int, ranks: int = 4) -> Run:
    run = Run(ranks=ranks).start()
    run.view.directory = DIRECTORY
    for step in range(lines):
        run.say(step % ranks, f"step {step:06d}  \x1b[32mloss\x1b[0m 0.22\n")
    return run.end()


def test_a_long_log_scrolls_in_a_box_of_twenty_lines() -> None:
    html = render_html(printed(50_000).view)
    assert len(html.encode()) <= 75_000
    box = re.search(r'<div class="sgpu-scroll"[^>]*style="max-height:372px;overflow:auto;[^>]*>', html)
    assert box is not None
    assert "sgpu-scroll" not in render_html(printed(20).view)
    assert "<details" not in render_html(printed(20).view)
    assert render_html(printed(21).view).count('class="sgpu-scroll"') == 1


def test_few_lines_that_wrap_scroll_too() -> None:
    run = Run(ranks=1).start()
    for _ in range(6):
        run.say(0, "x" * 400 + "\n")
    assert 'class="sgpu-scroll"' in render_html(run.end().view)


def test_paper_has_all_that_the_box_has() -> None:
    html = render_html(printed(200).view)
    assert re.search(r"<style>@media print\{\.sgpu-scroll,\.sgpu-scrolls\{max-height:none!important", html)
    assert "<style" not in render_html(printed(20).view)


@pytest.mark.parametrize("lines", [80, 81, 500, 50_000])
def test_without_styles_the_first_and_the_last_40_lines_are_shown(lines: int) -> None:
    view = printed(lines).view
    html = render_html(view)
    shown = re.sub(r"<details class=\"sgpu-saved-fold.*?</details>", "FOLDED\n", html, flags=re.DOTALL)
    steps = [int(step) for step in re.findall(r"step (\d+)", stripped(shown).partition("rank 0 ·")[0])]
    assert steps == [*range(40), *range(lines - 40, lines)]
    assert ("FOLDED" in shown) == (lines > 80)
    text = render_text(view)
    assert [int(step) for step in re.findall(r"step (\d+)", text)] == steps
    where = f"sgpu logs 7f3a · {DIRECTORY}/rank-*.log"
    left_out = re.findall(r"^\.\.\. ([\d,]+) lines? of [14] ranks? in the run's log: (.*)$", text, re.MULTILINE)
    assert left_out == ([(f"{lines - 80:,}", where)] if lines > 80 else [])
    if lines == 50_000:
        more = int(re.search(r">([\d,]+) more lines</summary>", html)[1].replace(",", ""))
        below = unescape(shown.partition("FOLDED")[2])
        dropped = re.search(r">\.\.\. ([\d,]+) lines of 4 ranks in the run's log: ([^<]*)</span></div>", below)
        assert more + int(dropped[1].replace(",", "")) == lines - 80
        assert dropped[2] == where


def test_a_long_output_of_a_failed_run_does_not_cost_its_failure() -> None:
    run = Run(limit=10_000, cell=CELL).start()
    for step in range(5_000):
        run.say(step % 4, f"step {step:06d}\n")
    more = "\n".join(f"line {number} of a message that goes on and on" for number in range(5_000))
    before = value_error()
    failure = msgspec.structs.replace(
        before, message=f"{before.message}\n{more}", traceback_text=f"{before.traceback_text.strip()}\n{more}"
    )
    html = render_html(run.end(RunState.FAILED, 9.2, failure, released(0, 2, 3)).view)
    text = render_text(run.view)
    for shown in (stripped(html), text):
        assert "NaN in batch 118" in shown
        assert '---> 14         raise ValueError(f"NaN in batch {step}")' in shown
    assert "ValueError on rank 1" in html.partition("<details")[0] + stripped(html)
    assert "rank 1 of 4" in text
    assert len(html.encode()) < 12_000
    assert len(text.encode()) < 12_000


@pytest.mark.slow
def test_with_little_room_the_ranks_that_stand_out_are_listed() -> None:
    run = Run(ranks=1000, limit=20_000).start("a10").sample(70, idle_ranks=(700,))
    failure = msgspec.structs.replace(value_error(), rank=900)
    html = render_html(run.end(RunState.FAILED, 70, failure, released(*range(900))).view)
    assert len(html.encode()) <= 21_000
    listed = re.findall(r">rank (\d+)</b>", html)
    # those that stand out are open, the others behind a summary
    assert listed[:3] == ["700", "900", "0"]
    assert listed[2:] == sorted(listed[2:], key=int)
    assert f"and {1000 - len(listed)} more ranks: sgpu logs 7f3a --rank N" in stripped(html)


def test_the_record_is_small_and_complete() -> None:
    run = Run(ranks=64, outputs=("model",), retries=2).start("a10")
    run.view.directory = DIRECTORY
    run.sample(300)
    run.end(results=tuple(result(rank, 1200) for rank in range(64)))
    record = run_record(run.view)
    assert len(json.dumps(record)) < 16_000
    assert record["version"] == 1
    assert (record["run_id"], record["state"], record["ranks"]) == ("7f3a90c1", "succeeded", 64)
    assert (record["attempt"], record["attempts"], record["directory"]) == (1, 3, DIRECTORY)
    assert (record["returned"], record["returned_bytes"]) == ([{"name": "model", "all_ranks": False}], 1200)
    usage = record["usage"]
    assert isinstance(usage, dict)
    assert usage["ranks"] == list(range(64))
    assert usage["gpus_busy_pct"] == pytest.approx(90, abs=1)
    assert usage["mean_utilization_pct"][63] == pytest.approx(90, abs=1)
    assert usage["peak_power_w"][0] == pytest.approx(210, abs=1)
    assert usage["peak_bytes"] == [18_200_000_000] * 64
    assert "mean_utilization_pct" not in str(run_record(measured_on_cpu().view))


# ------------------------------------------------------------ output of ranks stays text

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"


class Elements(HTMLParser):
    """Every tag and attribute in the HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_everything_said_of_a_rank_is_escaped() -> None:
    run = Run(ranks=2).start("a10", labels=(EVIL, EVIL)).say(0, EVIL + "\n")
    run.view.directory = f"/tmp/{EVIL}"
    sample = RankSample(rank=0, kind="gpu", uuid=EVIL, utilization_pct=1.0, problem=EVIL)
    run.apply(
        rank_events.Sampled(seconds=1.0, samples=(sample,)), rank_events.DeviceIdle(rank=0, seconds=60, waits_in=EVIL)
    )
    live = render_html(run.view)
    html = render_html(run.end().view)
    for page in (live, html):
        elements = Elements()
        elements.feed(page)
        assert elements.open == []
        assert elements.tags <= {"div", "b", "span", "pre", "details", "summary", "svg", "title", "path"}
        assert elements.names <= {
            "class", "style", "role", "width", "height", "viewbox", "d", "fill", "stroke", "stroke-width", "opacity",
            "preserveaspectratio", "vector-effect",
        }  # fmt: skip
        assert "<script>alert(1)</script>" in stripped(page)


# ------------------------------------------------------------ while it runs


def test_a_live_form_tells_use_and_idle_gpus() -> None:
    run = Run().start("a10", labels=LABELS).say(0, "epoch 1\n").sample(70, idle_ranks=(3,))
    run.apply(rank_events.DeviceIdle(rank=3, seconds=60, waits_in="the DataLoader"), at=170.0)
    text = stripped(render_html(run.view))
    assert re.search(r"rank 3 [123] % · 18\.2 GB", text)
    assert "rank 3's GPU has been under 5 % for 60 s: it waits in the DataLoader" in text
    run.apply(rank_events.DeviceBusy(rank=3), at=171.0)
    assert "has been under" not in render_html(run.view)


@pytest.mark.parametrize("detach", [False, True])
def test_what_stands_beside_a_live_view_names_the_run_and_the_way_back(detach: bool) -> None:
    run = Run(ranks=64, outputs=("model",), shipped=Shipped(names=(EVIL,), total_bytes=1)).start("a10").sample(300)
    run.view.spec = msgspec.structs.replace(run.view.spec, detach=detach)
    for step in range(5000):
        run.say(step % 64, f"step {step}\n")
    bundle = interrupted_bundle(run.view)
    assert len(json.dumps(bundle)) < 20_000
    record = bundle[RUN_MIME]
    assert isinstance(record, dict)
    assert (record["state"], record["run_id"]) == ("running", "7f3a90c1")
    for text in (str(bundle["text/plain"]), stripped(str(bundle["text/html"]))):
        assert "train_digits" in text
        assert re.search("run 7f3a was running for .* when this was saved", text)
        assert "%sgpu_attach 7f3a shows it and brings model" in text
        assert ("It continues without its notebook" in text) == detach
        assert ("It ended with its notebook's kernel unless it was detached" in text) != detach
    assert "<script" not in str(bundle["text/html"])


def test_a_run_that_waits_says_so_when_it_is_saved() -> None:
    assert "run 7f3a was queued when this was saved" in str(interrupted_bundle(FORMS["queued"]().view)["text/plain"])


def test_a_run_whose_ranks_start_says_so_when_it_is_saved() -> None:
    run = Run().apply(
        ev.Placed(lease=Lease(lease_id="l", device_type="cpu", ranks=4), host="gpu1"),
        ev.StateChanged(state=RunState.STARTING),
    )
    text = str(interrupted_bundle(run.view)["text/plain"])
    assert re.search(r"run 7f3a was starting for \d[\d.]* \w+.* when this was saved", text), text


def test_the_bundle_of_the_last_segment_has_the_record() -> None:
    run = Run(ranks=1).start().say(0, "a\n").show(0, text_plain="one").say(0, "b\n").end()
    first, _, last = segments(run.view)
    assert isinstance(first, TextSegment)
    assert isinstance(last, TextSegment)
    above, below = mime_bundle(run.view, first, True, False), mime_bundle(run.view, last, False, True)
    assert RUN_MIME not in above
    assert "returned" not in str(above["text/html"])
    assert json.loads(json.dumps(below[RUN_MIME]))["whole"] is False


# ------------------------------------------------------------ curves


def heights(svg: str) -> list[list[int]]:
    """The heights of the line's segments from the bottom: 3 is nothing, 33 the top."""
    path = re.search(r'<path d="([^"]*)" fill="none"', svg)
    assert path is not None
    return [[36 - int(point.split(",")[1]) for point in part.split()] for part in path[1].split("M") if part]


def test_a_curve_is_drawn_to_scale_with_gaps() -> None:
    svg = sparkline([0.0, 50.0, None, 100.0, 200.0, None, 25.0], 100.0, 'a "<b>', "red")
    assert 'role="img"' in svg
    assert f'width="{WIDTH}" height="{HEIGHT}"' in svg
    assert "<title>a &quot;&lt;b&gt;</title>" in svg
    assert heights(svg) == [[3, 18], [33, 33], [10, 10]]
    assert heights(sparkline([0.0, 0.0], None, "", "red")) == [[3, 3]]
    assert heights(sparkline([], None, "", "red")) == []
    assert heights(sparkline([None, None], 100.0, "", "red")) == []


def test_a_long_curve_is_thinned_to_means() -> None:
    (line,) = heights(sparkline([float(at % 2 * 100) for at in range(88)], 100.0, "", "red"))
    assert len(line) == 44
    assert set(line) == {18}
