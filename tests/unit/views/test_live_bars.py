"""Progress bars as the programs themselves draw them, read back."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from tqdm import tqdm

from sgpu_magic.views import ansi
from sgpu_magic.views.live.rank_cards import bar_of, bar_of_all
from sgpu_magic.views.live.schema import Bar
from sgpu_magic.views.output import LineAssembler


def drawn(draw: Callable[[io.StringIO], object]) -> list[str]:
    """Return what stands in the unfinished line after each write, as a view sees it."""
    seen: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            lines = assembler.feed(text)
            seen.extend(line for line in (*lines, assembler.partial) if line)
            return len(text)

    assembler = LineAssembler()
    draw(Stream())
    return [ansi.plain(line) for line in seen if ansi.plain(line).strip()]


def run_bar(**options: object) -> Callable[[io.StringIO], object]:
    def draw(stream: io.StringIO) -> None:
        with tqdm(file=stream, mininterval=0, miniters=1, **options) as bar:
            for _ in range(5):
                bar.update(10)

    return draw


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"total": 50}, ["0/50 · 0 %", "10/50 · 20 %", "40/50 · 80 %", "50/50 · 100 %"]),
        ({"total": 50, "desc": "epoch 7/10"}, ["epoch 7/10 · 0 %", "epoch 7/10 · 20 %", "epoch 7/10 · 100 %"]),
        ({"total": 50, "desc": "epoch 7/10", "ascii": True}, ["epoch 7/10 · 40 %", "epoch 7/10 · 100 %"]),
        ({"total": 50, "ascii": " >="}, ["20/50 · 40 %"]),
        ({"total": 50, "desc": "load", "ncols": 40}, ["load · 60 %"]),
        ({"total": 50, "desc": "load", "ncols": 12}, ["load · 60 %"]),
        ({"total": 50, "unit": "B", "unit_scale": True, "postfix": {"loss": 0.25}}, ["20.0/50.0 · 40 %"]),
        ({"total": 50_000, "unit_scale": True, "initial": 12_345}, ["12.3k/50.0k · 25 %"]),
        ({"total": 50, "bar_format": "{l_bar}{bar}|"}, ["20 %", "100 %"]),
        ({"total": 50, "colour": "green", "desc": "green"}, ["green · 20 %"]),
    ],
)
def test_tqdm_bars_are_read(options: dict[str, object], texts: list[str]) -> None:
    bars = [bar for line in drawn(run_bar(**options)) if (bar := bar_of(line)) is not None]
    assert [text for text in dict.fromkeys(bar.text for bar in bars) if text in texts] == texts
    fractions = [bar.fraction for bar in bars if bar.fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0) or "initial" in options


def test_a_bar_without_a_total_says_how_far_it_is() -> None:
    bars = [bar_of(line) for line in drawn(run_bar(desc="reading", unit="file"))]
    assert bars[-1] == Bar(fraction=None, text="reading · 50file")
    bars = [bar_of(line) for line in drawn(run_bar(unit_scale=True, unit="B", initial=1_200_000))]
    assert bars[-1] == Bar(fraction=None, text="1.20MB")


def test_of_nested_bars_each_line_is_one() -> None:
    def draw(stream: io.StringIO) -> None:
        for _ in tqdm(range(2), desc="epoch", file=stream, mininterval=0):
            for _ in tqdm(range(4), desc="batch", file=stream, mininterval=0, position=1, leave=False):
                pass

    told = {bar.text for line in drawn(draw) if (bar := bar_of(line)) is not None}
    assert {"epoch · 0 %", "epoch · 50 %", "epoch · 100 %", "batch · 25 %", "batch · 100 %"} <= told


@pytest.mark.parametrize(
    ("line", "fraction", "text"),
    [
        # the text of tqdm.notebook's widget
        ("  0%|          | 0/10 [00:00<?, ?it/s]", 0.0, "0/10 · 0 %"),
        # transformers' and Lightning's
        (" 62%|██████▏   | 61/98 [00:02<00:01, 25.11it/s]", 61 / 98, "61/98 · 62 %"),
        ("Epoch 7:  62%|██████▏   | 61/98 [00:02<00:01, 25.11it/s, v_num=0]", 61 / 98, "Epoch 7 · 62 %"),
        # of several on one line the first
        ("a:  50%|█████     | 1/2 [00:00<00:00]b:  10%|█  | 1/10 [00:00<00:00]", 0.5, "a · 50 %"),
        ("epoch 7/10 62%|███", 0.62, "epoch 7/10 · 62 %"),
        # rich's, Keras 3's, Keras 2's
        ("Training ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━  41% 0:00:12", 0.41, "Training · 41 %"),
        ("61/98 ━━━━━━━━━━━━━━━━━━━━ 3s 50ms/step - loss: 0.31", 61 / 98, "61/98 · 62 %"),
        ("61/98 [=================>............] - ETA: 3s - loss: 0.31", 61 / 98, "61/98 · 62 %"),
        # words
        ("epoch 7/10", 0.7, "epoch 7/10"),
        ("Epoch [3/4], Step [100/600], Loss: 0.25", 0.75, "epoch 3/4"),
        ("[2024-01-01 10:00:00] INFO step 30 of 120: loss 0.3", 0.25, "step 30/120"),
    ],
)
def test_bars_of_others_are_read(line: str, fraction: float, text: str) -> None:
    bar = bar_of(line)
    assert bar is not None
    assert bar.text == text
    assert bar.fraction == pytest.approx(fraction, abs=1e-3)


@pytest.mark.parametrize(
    "line",
    [
        "", "epoch 1  train 0.412  held-out 0.901", "accuracy 62%", "a|b", "step 1180  loss 0.22", "3/4", "epoch 7/0",
        "epoch 11/10", "see /usr/lib/x 3/4", "2024/11/20 10:00", "1234%|", "batch 3/4.5", "| 50% | of the table |",
        "Traceback (most recent call last):", "[==]", "tests/step 1/2/3",
    ],
)  # fmt: skip
def test_other_lines_are_no_bars(line: str) -> None:
    assert bar_of(line) is None


def test_a_long_label_is_cut_and_a_long_line_costs_nothing() -> None:
    bar = bar_of("x" * 100 + ":  50%|██   | 1/2 [00:00<00:00, 1it/s]")
    assert bar is not None
    assert bar.text == "x" * 39 + "… · 50 %"
    assert bar_of("0" * 100_000 + "%[━/ of |") is None


def test_the_run_is_as_far_as_its_ranks_are_on_average() -> None:
    def bar(fraction: float | None, label: str = "epoch 7/10") -> Bar:
        return Bar(fraction=fraction, text=f"{label} · {fraction}")

    assert bar_of_all([bar(0.5), bar(0.7)]) == Bar(fraction=0.6, text="epoch 7/10 · 60 %")
    assert bar_of_all([bar(0.5), bar(0.7), None]) == Bar(fraction=0.6, text="epoch 7/10 · 60 %")
    assert bar_of_all([bar(0.5), bar(0.7, "epoch 6/10")]) == Bar(fraction=0.6, text="60 %")
    assert bar_of_all([bar(0.5), None]) is None, "half of them is not most"
    assert bar_of_all([bar(None), bar(None)]) is None
    assert bar_of_all([]) is None
