"""The line below launchers of other packages in a plain cell."""

from __future__ import annotations

import pytest

from sgpu_magic.magics.cell_hooks import hint_for

ON_POOL = "sgpu: to run this on the pool, write "


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("notebook_launcher(train, (0.1, data), num_processes=4)", ("`train(0.1, data)`", "--gpus 4`.")),
        ("accelerate.notebook_launcher(train, args=given, num_processes=n)", ("`train(...)`", "--gpus n`.")),
        ("if x:\n    notebook_launcher(lib.main)", ("`lib.main()`", "--gpus N`.")),
    ],
)
def test_a_launch_in_a_cell_says_how_it_runs_on_the_pool(source: str, words: tuple[str, str]) -> None:
    assert hint_for(source) == f"{ON_POOL}{words[0]} in a cell with `%%distributed {words[1]}"


def test_so_does_lightnings_strategy() -> None:
    words = '`%%distributed --gpus 2` above the cell, and strategy="ddp" in it.'
    for strategy in ("ddp_notebook", "ddp_notebook_find_unused_parameters_true"):
        assert hint_for(f"trainer = Trainer(devices=2, strategy={strategy!r})") == ON_POOL + words


@pytest.mark.parametrize(
    "source",
    ["from accelerate import notebook_launcher", "x = 'ddp_notebook'", "Trainer(strategy='ddp')", "notebook_launcher("],
)
def test_other_cells_say_nothing(source: str) -> None:
    assert hint_for(source) == ""
