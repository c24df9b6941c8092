"""An error names an option as its reader writes it: on a command line, as an argument, in a job file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.scheduler_requests import spec

from sgpu_magic.cli.headless.job import job_from
from sgpu_magic.errors import CapacityError, SgpuError, UsageError
from sgpu_magic.functions.decorator import distributed
from sgpu_magic.options.argparse_form import parse
from sgpu_magic.options.table import OPTIONS, as_argument, as_job_key, in_python, options_spelled
from sgpu_magic.views.fold import RunView
from sgpu_magic.wire.base import ErrorKind, FailureKind, RunKind, RunState
from sgpu_magic.wire.client import Refused
from sgpu_magic.wire.events import Event, RunEnded
from sgpu_magic.wire.option_text import OptionName, on_command_line, text_of
from sgpu_magic.wire.rank_events import Failure

SPELLINGS: dict[Callable[[OptionName], str], Callable[[str], str]] = {
    on_command_line: lambda name: f"--{name}",
    as_argument: in_python,
    as_job_key: lambda name: name.replace("-", "_"),
}
"""The name of an option in each form."""


def words(text: str) -> set[str]:
    return set(re.findall(r"-*[a-z][\w-]*", text))


@pytest.mark.parametrize("value", [None, 4], ids=["alone", "with a value"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda spell: spell.__name__)
def test_an_error_names_each_option_in_its_readers_form_and_in_no_other(
    spell: Callable[[OptionName], str], name: str, value: int | None
):
    with pytest.raises(SgpuError) as caught, options_spelled(spell):
        raise CapacityError(text_of("Change ", OptionName(name, value), "!"))
    own = SPELLINGS[spell](name)
    others = {spelling(name) for spelling in SPELLINGS.values()} - {own}
    assert own in words(caught.value.message)
    assert not others & words(caught.value.message)
    assert caught.value.message == str(caught.value)


@pytest.mark.parametrize(
    ("named", "spelled"),
    [
        (OptionName("gpus", 4), "gpus=4"),
        (OptionName("type", "a10"), 'gpu_type="a10"'),
        (OptionName("wait", "10m"), 'wait="10m"'),
        (OptionName("allow-busy"), "allow_busy=True"),
        (OptionName("no-track"), "track=False"),
    ],
)
def test_an_argument_is_spelled_as_python(named: OptionName, spelled: str):
    assert as_argument(named) == spelled


def test_one_error_in_each_form(tmp_path: Path):
    (tmp_path / "n.ipynb").write_text("{}")
    job = tmp_path / "job.yaml"
    job.write_text("notebook: n.ipynb\ngpus: 4\nnodes: 3\n")
    with pytest.raises(UsageError, match=r"such as --gpus 3, or leave --nodes out"):
        parse("--gpus 4 --nodes 3")
    with pytest.raises(UsageError, match=r"such as gpus=3, or leave nodes out"):
        distributed(gpus=4, nodes=3)
    with pytest.raises(UsageError, match=r"such as gpus: 3, or leave nodes out"):
        job_from(str(job), {})


def test_a_pools_text_keeps_its_options_on_the_wire():
    text = text_of("Use ", OptionName("gpus", 2), " or fewer.")
    refused = Refused(request=1, error=ErrorKind.CAPACITY, message=text)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(refused), type=Refused) == refused
    plain = Refused(request=1, error=ErrorKind.CAPACITY, message="Use --gpus 2.")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Refused) == plain


@pytest.mark.parametrize(("kind", "output"), [(RunKind.CELL, "Use --gpus 2."), (RunKind.CALL, "Use gpus=2.")])
def test_a_view_of_a_failed_run_names_options_as_its_caller_does(kind: RunKind, output: str):
    text = text_of("Use ", OptionName("gpus", 2), ".")
    view = RunView(msgspec.structs.replace(spec("0123abcd"), kind=kind))
    failure = Failure(kind=FailureKind.CAPACITY, message=str(text), text=text)
    view.apply(Event(run_id=view.run_id, seq=1, at=0.0, body=RunEnded(state=RunState.FAILED, failure=failure)))
    assert view.failure is not None
    assert view.failure.message == output
