"""Progress bars as programs draw them, parsed from the output."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from tqdm import tqdm

from sgpu_magic.views import ansi
from sgpu_magic.views.live.bars import bar_of, without_bar
from sgpu_magic.views.live.run_progress import RunProgress
from sgpu_magic.views.live.schema import Bar
from sgpu_magic.views.output import LineAssembler
from sgpu_magic.wire.rank_events import OutputWritten


def drawn(draw: Callable[[io.StringIO], object]) -> list[str]:
    """Return the content of the unfinished line after each write, as a view sees it."""
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

    reported = {bar.text for line in drawn(draw) if (bar := bar_of(line)) is not None}
    assert {"epoch · 0 %", "epoch · 50 %", "epoch · 100 %", "batch · 25 %", "batch · 100 %"} <= reported


@pytest.mark.parametrize(
    ("line", "fraction", "text"),
    [
        # the text of tqdm.notebook's widget
        ("  0%|          | 0/10 [00:00<?, ?it/s]", 0.0, "0/10 · 0 %"),
        # transformers' and Lightning's
        (" 62%|██████▏   | 61/98 [00:02<00:01, 25.11it/s]", 61 / 98, "61/98 · 62 %"),
        ("Epoch 7:  62%|██████▏   | 61/98 [00:02<00:01, 25.11it/s, v_num=0]", 61 / 98, "Epoch 7 · 62 %"),
        # of several on one line, the first
        ("a:  50%|█████     | 1/2 [00:00<00:00]b:  10%|█  | 1/10 [00:00<00:00]", 0.5, "a · 50 %"),
        ("epoch 7/10 62%|███", 0.62, "epoch 7/10 · 62 %"),
        # rich's, Keras 3's, Keras 2's
        ("Training ━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━  41% 0:00:12", 0.41, "Training · 41 %"),
        ("61/98 ━━━━━━━━━━━━━━━━━━━━ 3s 50ms/step - loss: 0.31", 61 / 98, "61/98 · 62 %"),
        ("61/98 [=================>............] - ETA: 3s - loss: 0.31", 61 / 98, "61/98 · 62 %"),
        # plain text
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


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("epoch 1/3:  67%|██████▋   | 67/100 [00:07<00:03,  8.97it/s]", "epoch 1/3: 67/100 · 8.97 it/s · 3 s left"),
        (
            " 62%|██████▏   | 61/98 [00:02<02:01, 25.11it/s, loss=0.3]",
            "61/98 · 25.11 it/s · 2 min 01 s left · loss=0.3",
        ),
        ("epochs: 100%|██████| 3/3 [00:06<00:00,  2.09s/it]", "epochs: 3/3 · 2.09 s/it"),
        ("  0%|      | 0/98 [00:00<?, ?it/s]", "0/98"),
        ("get: 10%|█  | 1.2M/12M [00:02<1:02:14, 25.1MB/s]", "get: 1.2M/12M · 25.1 MB/s · 1 h 02 min left"),
        ("epoch 7/10:  62%|██████▏   | 61/98 [00:02<00:01, 25.", "epoch 7/10: 61/98 [00:02<00:01, 25."),
        ("load:  62%|██████▏   |", "load: 62%"),
        ("epoch 7/10:  62%|██", "epoch 7/10: 62%"),
        ("Training ━━━━━━━━╸━━━━━━━  41% 0:00:12", "Training 41% 0:00:12"),
        ("61/98 [=================>............] - ETA: 3s - loss: 0.31", "61/98 - ETA: 3s - loss: 0.31"),
        ("epoch 7/10  loss 0.3", "epoch 7/10  loss 0.3"),
        ("a table | with | bars", "a table | with | bars"),
        ("", ""),
    ],
)
def test_a_bars_own_text_stays_without_the_drawn_bar(line: str, text: str) -> None:
    assert without_bar(line) == text


# ------------------------------------------------------------ the progress of a run


class Ranks:
    """Ranks that write, and the run's progress after each write."""

    def __init__(self, ranks: int = 1) -> None:
        self.progress = RunProgress()
        self.numbers = range(ranks)
        self.bars: list[Bar | None] = []

    def write(self, text: str, rank: int = 0, stream: str = "stderr") -> Bar | None:
        self.progress.write(OutputWritten(rank=rank, stream=stream, text=text, start=0, end=len(text)))
        self.bars.append(self.progress.bar(self.numbers, {}))
        return self.bars[-1]

    @property
    def sink(self) -> io.StringIO:
        ranks = self

        class Sink(io.StringIO):
            def write(self, text: str) -> int:
                ranks.write(text)
                return len(text)

        return Sink()

    def fractions(self, since: int = 0) -> list[float]:
        reported = [bar.fraction for bar in self.bars[since:] if bar is not None]
        assert None not in reported
        return [fraction for fraction in reported if fraction is not None]

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(bar.text for bar in self.bars if bar is not None))


def test_bars_with_an_epoch_in_their_label_count_up_to_the_end_of_all() -> None:
    run = Ranks()
    for epoch in range(3):
        for step in tqdm(range(100), desc=f"epoch {epoch + 1}/3", file=run.sink, mininterval=0):
            if step == 50:
                run.write(f"epoch {epoch + 1}/3 step {step}\n", stream="stdout")
    assert run.fractions() == sorted(run.fractions())
    assert (run.fractions()[0], run.fractions()[-1]) == (0.0, 1.0)
    assert {"epoch 1 of 3, 1 %", "epoch 2 of 3, 43 %", "epoch 3 of 3, 100 %"} <= set(run.texts)


def test_lines_about_epochs_count_until_a_bar_is_drawn() -> None:
    run = Ranks()
    assert run.write("Epoch 1/3\n", stream="stdout") == Bar(fraction=0.3333, text="epoch 1 of 3, 33 %")
    assert run.write("Epoch 2/3\n", stream="stdout") == Bar(fraction=0.6667, text="epoch 2 of 3, 67 %")
    drawn = run.write("\r5/10 [=====>....] - ETA: 3s", stream="stdout")
    assert drawn == Bar(fraction=0.5, text="5/10, 50 %") or drawn == Bar(fraction=0.5, text="50 %")
    assert run.write("\nEpoch 3/3\n", stream="stdout") == drawn


def test_two_counts_in_a_line_are_one_in_the_other() -> None:
    run = Ranks()
    for epoch, step in ((1, 300), (1, 600), (2, 0), (2, 300), (3, 600)):
        run.write(f"Epoch [{epoch}/3], Step [{step}/600], Loss: 0.25\n", stream="stdout")
    assert run.texts == ["epoch 1 of 3, 17 %", "epoch 1 of 3, 33 %", "epoch 2 of 3, 33 %", "epoch 2 of 3, 50 %",
                         "epoch 3 of 3, 100 %"]  # fmt: skip


def test_what_comes_after_a_bar_is_a_stage_of_its_own() -> None:
    run = Ranks()
    for desc, total in (("download", 10), ("train", 40)):
        for _ in tqdm(range(total), desc=desc, file=run.sink, mininterval=0):
            pass
    assert {"download, 100 %", "train, 0 %", "train, 50 %"} <= set(run.texts)


def test_changing_numbers_in_a_label_are_the_same_bar() -> None:
    run = Ranks()
    with tqdm(range(10), file=run.sink, mininterval=0) as bar:
        for step in bar:
            bar.set_description(f"loss {1 / (step + 1):.3f}")
    assert run.fractions() == sorted(run.fractions())
    assert run.texts[-1] == "loss 0.100, 100 %"


def test_a_bar_that_is_cut_between_two_batches_is_read_whole() -> None:
    run = Ranks()
    run.write("\repoch 1/2:  5")
    assert run.bars == [None]
    assert run.write("0%|#####     | 5/10 [00:01<00:01]") == Bar(fraction=0.25, text="epoch 1 of 2, 25 %")


def test_the_run_is_as_far_as_its_ranks_are_on_average() -> None:
    run = Ranks(4)
    run.write("\repoch 2/2:   0%|     | 0/10 [", rank=0)
    assert run.write("\repoch 1/2:  40%|     | 4/10 [", rank=2) is None, "half of them is not most"
    assert run.write("\repoch 1/2:  90%|     | 9/10 [", rank=3) == Bar(fraction=0.3833, text="epoch 1 of 2, 38 %")
    run.progress.start_again()
    assert run.progress.bar(run.numbers, {}) is None
