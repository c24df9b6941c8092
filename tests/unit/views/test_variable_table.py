"""`%sgpu_who`: the table of the ranks' variables as text and HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import unescape

import pytest

from sgpu_magic.views.variable_table import VariableListing, variables_html, variables_text
from sgpu_magic.wire.run import RankAnswer, Variable


def tensor(name: str, rows: int = 10, device: str = "cpu") -> Variable:
    return Variable(name=name, type="Tensor", shape=(rows, 4), dtype="float32", device=device, size_bytes=rows * 4 * 4)


def listing(
    by_rank: Mapping[int, Sequence[Variable]],
    ranks: int | None = None,
    patterns: tuple[str, ...] = (),
    left_out: Mapping[int, int] | None = None,
) -> VariableListing:
    empty = VariableListing(
        session="main", ranks=len(by_rank) if ranks is None else ranks, patterns=patterns, by_rank={}
    )
    more = left_out or {}
    answers = {rank: RankAnswer(variables=tuple(found), left_out=more.get(rank, 0)) for rank, found in by_rank.items()}
    return empty.with_answers(answers)


def lines(shown: VariableListing) -> list[str]:
    return variables_text(shown).splitlines()


def plain(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def test_variables_that_are_alike_have_one_row_each():
    alike = [Variable(name="history", type="list", length=1200), Variable(name="lr", type="float"), tensor("x")]
    assert lines(listing({0: alike, 1: alike})) == [
        "session main · 2 ranks · 3 variables",
        "",
        "name      type     shape       dtype     device    size",
        "history   list     len 1,200",
        "lr        float",
        "x         Tensor   (10, 4)     float32   cpu      160 B",
    ]


def test_ranks_that_differ_have_rows_of_their_own_and_a_mark():
    found = {rank: [tensor("x", 10 if rank < 3 else 12)] for rank in range(4)}
    found[1] = [Variable(name="best", type="int"), *found[1]]
    assert lines(listing(found)) == [
        "session main · 4 ranks · 2 variables · 2 differ between ranks (≠)",
        "",
        "  name   type      shape     dtype     device    size   ranks",
        "≠ best   not set                                        0, 2, 3",
        "         int                                            1",
        "≠ x      Tensor    (10, 4)   float32   cpu      160 B   0, 1, 2",
        "         Tensor    (12, 4)   float32   cpu      192 B   3",
    ]


def test_each_ranks_own_gpu_is_no_difference():
    assert "cuda:0-7 " in lines(listing({rank: [tensor("x", device=f"cuda:{rank}")] for rank in range(8)}))[-1]
    moved = lines(listing({rank: [tensor("x", 10 + rank // 2, f"cuda:{rank}")] for rank in range(3)}))
    assert [re.split(r"\s{2,}", line)[-3:] for line in moved[-2:]] == [
        ["cuda:0-1", "160 B", "0, 1"],
        ["cuda:2", "176 B", "2"],
    ]
    shown = variables_text(listing({rank: [tensor("x", device="cuda:0")] for rank in range(2)}))
    assert "differ" not in shown
    assert "cuda:0 " in shown
    shown = lines(listing({0: [tensor("x", device="cuda:1")], 1: [tensor("x", device="cuda:0")]}))
    assert [line.split()[-3] for line in shown[-2:]] == ["160", "160"]
    assert ["cuda:1" in shown[-2], "cuda:0" in shown[-1]] == [True, True]


def test_many_different_ranks_are_bounded():
    shown = lines(listing({rank: [tensor("x", 10 + rank)] for rank in range(20)}))
    assert len(shown) == 3 + 8 + 1
    assert shown[-1].split()[-1] == "8-19"
    assert "others" in shown[-1]


def test_what_was_asked_for_is_in_the_head():
    assert lines(listing({0: [], 1: []})) == ["session main · 2 ranks · no variables yet"]
    found = listing({1: [], 2: []}, ranks=4, patterns=("loss*", "model"))
    assert lines(found) == ["session main · ranks 1, 2 of 4 · no variable matches loss*, model"]
    assert lines(listing({2: [tensor("x")]}, ranks=4))[0] == "session main · rank 2 of 4 · 1 variable"


def test_a_bounded_answer_makes_no_difference_between_ranks():
    """Rank 1's answer ended before `c`, which it has too."""
    found = {0: [tensor("a"), tensor("c")], 1: [tensor("a"), tensor("b")]}
    shown = lines(listing(found, left_out={1: 7}))
    assert shown[0] == "session main · 2 ranks · 9 variables · 1 differs between ranks (≠)"
    assert not any(" c " in line for line in shown)
    assert shown[-1] == "and 7 more: %sgpu_who with names or patterns, such as loss*, lists those"


def test_names_of_ranks_that_share_none_are_bounded_together():
    found = {rank: [tensor(f"x{rank}_{number:03}") for number in range(400)] for rank in range(3)}
    shown = lines(listing(found))
    assert sum("x" in line for line in shown if line.startswith("≠")) == 500


@pytest.mark.parametrize("length", [5, 30, 200])
def test_the_text_fits_80_columns(length: int):
    found = {
        rank: [
            Variable(
                name="n" * length,
                type="T" * length,
                shape=(128, 3, 224, 224 + rank),
                dtype="bfloat16",
                device=f"cuda:{rank}",
                size_bytes=38_535_168,
            )
        ]
        for rank in range(2)
    }
    shown = lines(listing(found))
    assert max(map(len, shown)) <= 80
    assert ("..." in shown[-1]) == (length > 5)
    assert "n" * length in variables_html(listing(found))


def test_text_of_ranks_is_escaped():
    odd = "<script>alert(1)</script> $a$ \x1b[31mred\nline"
    found = listing({0: [Variable(name=odd, type=odd, dtype=odd, device=odd)]}, patterns=(odd,))
    html, text = variables_html(found), variables_text(found)
    assert "<script>" not in html
    assert "$a$" not in html
    assert "alert(1)" in plain(html)
    assert "\x1b" not in html + text
    assert len(text.splitlines()) == 4
    # escape sequences need no room
    coloured = Variable(name="\x1b[31m" * 20 + "loss", type="float")
    assert "loss   float" in variables_text(listing({0: [coloured]}))


def test_the_html_has_the_same_words():
    found = {rank: [tensor("x", 10 + rank), Variable(name="only", type="int")] for rank in range(2)}
    shown = listing(found).with_notes("rank 3 is dead; %sgpu_restart --rank 3 replaces it")
    words = plain(variables_html(shown)).split()
    assert sorted(words) == sorted(variables_text(shown).replace("main ·", "main").split())
    assert "<script" not in variables_html(shown)
