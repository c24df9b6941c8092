"""`sgpu torchrun`: torchrun's options translated to those of `sgpu run`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from sgpu_magic.cli.main import CommandParser, command_parser
from sgpu_magic.cli.torchrun import COMMANDS, command_line_of, notes
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
    made = command_line_of(parsed(line))
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
        command_line_of(parsed(line))


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
    assert command_line_of(parsed("-m torchrun_package.train 5"))[-3:] == [str(package / "train.py"), "--", "5"]
    assert command_line_of(parsed("-m torchrun_package"))[-2] == str(package / "__main__.py")


# ---------------------------------------------------------------- as torchrun reads them


def test_every_option_of_torchrun_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each takes its default from the variable that torchrun takes it from; one that torch adds fails here."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    parser = CommandParser(prog="sgpu torchrun")
    COMMANDS["torchrun"](parser)
    own = {action.dest: action for action in parser._actions}
    for theirs in get_args_parser()._actions:
        if not theirs.option_strings or theirs.dest == "help":
            continue
        assert set(theirs.option_strings) <= set(own[theirs.dest].option_strings), theirs.dest
        if theirs.dest == "standalone":
            # it has no effect, and is accepted without a note
            continue
        alone = getattr(get_args_parser().parse_args(["t.py"]), theirs.dest)
        monkeypatch.setenv(f"PET_{theirs.dest.upper()}", "7")
        took = getattr(get_args_parser().parse_args(["t.py"]), theirs.dest)
        ours = getattr(parsed("t.py"), theirs.dest)
        monkeypatch.delenv(f"PET_{theirs.dest.upper()}")
        if took != alone:
            assert str(ours) == ("True" if took is True else "7"), theirs.dest
        else:
            assert not ours, theirs.dest


@pytest.mark.parametrize(
    ("variables", "line", "words"),
    [
        ({"PET_NPROC_PER_NODE": "4"}, "t.py", "run --as-script --gpus 4 t.py --"),
        ({"PET_NPROC_PER_NODE": "4"}, "--nproc-per-node 2 t.py", "run --as-script --gpus 2 t.py --"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MAX_RESTARTS": "3"},
            "t.py",
            "run --as-script --gpus 2 --nodes 2 --restarts 3 t.py --",
        ),
        ({"PET_MODULE": "0", "PET_NO_PYTHON": "0"}, "--use-env t.py", "run --as-script --gpus 1 t.py --"),
    ],
)
def test_variables_are_defaults(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str, words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert command_line_of(parsed(line)) == words.split()


def test_a_variable_that_has_no_effect_or_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
    assert notes(parsed("t.py")) == ["PET_RDZV_BACKEND has no effect: the pool arranges the rendezvous."]
    monkeypatch.setenv("PET_RUN_PATH", "1")
    with pytest.raises(UsageError, match="run-path"):
        command_line_of(parsed("t.py"))
    monkeypatch.setenv("PET_RUN_PATH", "yes")
    with pytest.raises(UsageError, match="PET_RUN_PATH is 'yes'"):
        parsed("t.py")
