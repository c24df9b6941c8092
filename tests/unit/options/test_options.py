"""The table of options and its forms: magic lines, Python, job files and commands."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from sgpu_magic.cli.main import command_parser
from sgpu_magic.errors import UsageError
from sgpu_magic.magics import session_magics  # noqa: F401  the parsers of its magics are known then
from sgpu_magic.options import option_records, table
from sgpu_magic.options.argparse_form import LINE_PARSERS, parse, parser, read_session
from sgpu_magic.options.job_form import JobFile, defaults_of, with_line
from sgpu_magic.options.notebook_job import JobDefaults, as_arguments
from sgpu_magic.options.option_records import Devices, EnvironmentOptions
from sgpu_magic.options.python_form import Options, checked
from sgpu_magic.options.table import OPTIONS, in_python
from sgpu_magic.runs.sessions import connect

ALL = "--env-version ai-4 --torch mine --allow-build --no-track --max-cost 5"
ASKED = EnvironmentOptions(env_version="ai-4", torch_mine=True, allow_build=True, track=False)


def fields_of(record: type) -> set[str]:
    return set(record.__struct_fields__)


@pytest.mark.parametrize(
    ("form", "record"),
    [
        (table.CELL, option_records.CellOptions),
        (table.CALL, option_records.CallOptions),
        ([name for name in table.SESSION if name != "ui"], option_records.SessionOptions),
        (table.REPLAY, option_records.ReplayOptions),
    ],
    ids=["cell", "call", "session", "replay"],
)
def test_each_option_of_a_form_asks_for_something(form: tuple[str, ...], record: type):
    assert len(set(form)) == len(form)
    known = fields_of(record) | {f"devices.{name}" for name in fields_of(Devices)}
    known |= {f"environment.{name}" for name in fields_of(EnvironmentOptions)}
    assert {OPTIONS[name].asks for name in form} <= known


def test_python_has_the_same_options():
    beside = {"num_gpus", "remote", "session"}
    assert {in_python(name) for name in table.CALL} == Options.__annotations__.keys() - beside
    assert {in_python(name) for name in table.SESSION} == inspect.signature(connect).parameters.keys()


def test_a_job_files_keys_are_options_of_the_command():
    line = vars(command_parser(["run"]).parse_args(["run", "n.ipynb"]))
    # aliases in the file, and plurals that the command line gives one by one
    beside = {"notebook", "hardware_accelerator", "environment", "timeout_s", "parameters"}
    assert set(JobFile.__struct_fields__) - beside <= line.keys()
    assert {name.replace("-", "_") for name in (*table.DEVICES, "env-version", "max-cost")} <= line.keys()


def test_what_a_job_gives_is_a_line_that_is_read_as_the_same():
    file = with_line(JobFile(gpus=2, type="a10"), {"gpus": 4, "nodes": 2, "min_memory": "40GB", "max_cost": "2.5"})
    given = defaults_of(file, "the command")
    assert given == JobDefaults(gpus=4, type="a10", nodes=2, min_memory="40GB", max_cost=2.5)
    options = parse(" ".join(as_arguments(given)))
    assert options is not None
    assert (options.devices, options.max_cost) == (Devices(4, "a10", 40 * 10**9, 2), 2.5)


def test_a_cells_line_is_read():
    options = parse(f"--gpus 2 {ALL} --profile")
    assert (options.environment, options.max_cost, options.profile) == (ASKED, 5.0, True)
    options = parse("--gpus 2")
    assert (options.environment, options.max_cost, options.profile) == (EnvironmentOptions(), None, False)
    assert parse("--env-version 'my files/r.txt'").environment.env_version == "my files/r.txt"
    assert parse("0 --profile --no-track", "%%rank").profile


def test_a_sessions_line_is_read():
    connect_line = LINE_PARSERS["sgpu_connect"]()
    options = read_session(connect_line.read(ALL))
    assert (options.environment, options.max_cost) == (ASKED, 5.0)
    with pytest.raises(UsageError, match="--profile records a trace of one cell"):
        read_session(connect_line.read("--profile"))


def test_python_options_mean_the_same():
    options = checked(env_version="ai-4", torch="mine", allow_build=True, track=False, max_cost=5, profile=True)
    assert (options.environment, options.max_cost, options.profile) == (ASKED, 5.0, True)
    assert checked().environment == EnvironmentOptions()
    assert checked(torch="node", track=True).environment == EnvironmentOptions(track=True)
    assert checked(env_version=4).environment.env_version == "4"
    assert checked(env_version=Path("r.txt")).environment.env_version == "r.txt"


@pytest.mark.parametrize("cost", ["0", "-1", "nan", "inf", "much", ""])
def test_what_is_no_cost_is_refused(cost: str):
    with pytest.raises(UsageError, match="amount above 0"):
        parse(f"--max-cost '{cost}'")


def test_help_tells_of_each():
    text = parser().format_help()
    for option in (*ALL.split()[::2], "--profile"):
        if option.startswith("--"):
            assert option in text
    assert "--profile" not in LINE_PARSERS["sgpu_connect"]().format_help()
