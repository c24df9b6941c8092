"""`sgpu torchrun`: torchrun's options in the words of `sgpu run`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from sgpu_magic.cli.main import command_parser
from sgpu_magic.cli.torchrun import notes, words_for_run
from sgpu_magic.errors import UsageError


def parsed(line: str) -> argparse.Namespace:
    return command_parser(["torchrun"]).parse_args(["torchrun", *line.split()])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py --lr 0.1 -m x", "run --as-script --gpus 1 train.py -- --lr 0.1 -m x"),
        ("--standalone --nproc_per_node=4 train.py", "run --as-script --gpus 4 train.py --"),
        ("--nnodes 2 --nproc-per-node 4 t.py -- a", "run --as-script --gpus 8 --nodes 2 t.py -- a"),
        ("--nnodes 2:2 --node-rank 0 t.py", "run --as-script --gpus 2 --nodes 2 t.py --"),
        ("--nproc-per-node gpu --type a10 t.py", "run --as-script --type a10 t.py --"),
        ("--max-restarts 3 --pool team t.py", "run --as-script --gpus 1 --pool team --restarts 3 t.py --"),
    ],
)
def test_options_that_mean_something_here(line: str, words: str) -> None:
    made = words_for_run(parsed(line))
    assert made == words.split()
    values = command_parser(made).parse_args(made[: made.index("--")])
    assert values.target == made[made.index("--") - 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes 1:4 t.py", "a run has a fixed number of nodes"),
        ("--nnodes x t.py", "a number of nodes is needed"),
        ("--nproc-per-node 0 t.py", "a number above 0"),
        ("--nnodes 2 --nproc-per-node gpu t.py", "give the number of ranks on each node"),
        ("--node-rank 1 t.py", "Start the command once"),
        ("--no-python echo", "the ranks run Python"),
        ("-m no_such_module_here", "there is no such module"),
    ],
)
def test_options_that_have_no_equivalent(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        words_for_run(parsed(line))


def test_options_without_effect_say_why() -> None:
    values = parsed("--rdzv-backend c10d --rdzv_endpoint=h:1 --standalone -t 3 --nproc-per-node 2 t.py --role x")
    assert notes(values) == [
        "--rdzv-backend, --rdzv-endpoint have no effect: the pool arranges the rendezvous.",
        "--tee has no effect: every rank has a log: `sgpu logs RUN --rank N`.",
    ]


def test_a_module_is_found_as_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torchrun_package"
    package.mkdir()
    for name in ("__init__", "__main__", "train"):
        (package / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)
    assert words_for_run(parsed("-m torchrun_package.train 5"))[-3:] == [str(package / "train.py"), "--", "5"]
    assert words_for_run(parsed("-m torchrun_package"))[-2] == str(package / "__main__.py")
