"""What users of notebooks and of ipyparallel expect of a session's cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel


@pytest.fixture
def connected(kernel: Kernel) -> Iterator[Kernel]:
    kernel.check("import sgpu_magic\nsession = sgpu_magic.connect(2, 'cpu', name='expected', ui='none')")
    yield kernel
    kernel.check("session.close()")


def test_ranks_are_named_as_in_ipyparallel(connected: Kernel):
    for line, ranks in {
        "%%distributed --ranks all": [0, 1],
        "%%distributed --ranks :": [0, 1],
        "%%distributed --ranks -1": [1],
        "%%distributed --ranks [0]": [0],
        "%%rank [0]": [0],
        "%%rank[0,1]": [0, 1],
        "%%rank -1": [1],
    }.items():
        connected.check(f"{line} --ui none\nrank")
        assert connected.value("[value for value in _.values if value is not None]") == ranks, line


def test_names_are_moved_as_in_ipyparallel(connected: Kernel):
    connected.check("session.scatter('x', range(4)); session.push({'a': 1, 'b': [2]}, c=3)")
    assert connected.value("session.run('list(x), a, b, c', ui='none').values[1]") == [[2, 3], 1, [2], 3]
    connected.check("try: session['nope']\nexcept KeyError as error: missing = str(error)")
    assert "has no `nope` for %sgpu_pull: it has x, a, b, c." in connected.value("missing")


def test_a_ranks_own_names_come_back_after_they_were_removed(connected: Kernel):
    connected.check("session.run('kept = 1\\ndel rank', ui='none'); session.run('%reset -f', ui='none')")
    assert connected.value("session.run('[rank, world_size, str(device)]', ui='none').values") == [
        [0, 2, "cpu"],
        [1, 2, "cpu"],
    ]


@pytest.mark.slow
def test_the_directory_before_is_the_notebooks(kernel: Kernel):
    kernel.check("%%distributed -n 1 --ui none\nimport os\n%cd -q /usr\n%cd -q -\nos.getcwd()")
    assert kernel.value("_.values[0] == __import__('os').getcwd()")


def test_out_can_be_read_where_a_session_stands_in_it(kernel: Kernel):
    kernel.check("%sgpu_connect -n 1 --type cpu")
    kernel.check("41 + 1")
    kernel.check("%%distributed --ui none\n42 in Out.values()")
    assert kernel.value("_.values") == [True]
    kernel.check("%sgpu_disconnect")


def test_exceptions_that_are_no_exception_arrive_in_their_type(kernel: Kernel):
    kernel.check(
        "class Stop(BaseException): pass\n"
        "from sgpu_magic import distributed\n"
        "@distributed(gpus=1, ui='none')\n"
        "def stop(kind): raise kind('s')\n"
        "caught = []\n"
        "for kind in (Stop, KeyboardInterrupt, SystemExit):\n"
        "    try: stop.distributed(kind)\n"
        "    except BaseException as error: caught.append(type(error).__name__)"
    )
    assert kernel.value("caught") == ["Stop", "RemoteError", "RemoteError"]


def test_a_launchers_place_is_not_the_ranks(new_kernel):
    variables = {
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "7",
    }
    kernel: Kernel = new_kernel(variables=variables)
    kernel.check(
        "%%distributed -n 1 --ui none --env SLURM_NTASKS=5\nimport os\n"
        f"{{name: os.environ.get(name) for name in {list(variables)!r}}}"
    )
    assert kernel.value("{k: v for k, v in _.values[0].items() if v}") == {"SLURM_NTASKS": "5", "SLURM_JOB_ID": "7"}


@pytest.mark.slow
def test_pydantics_generic_models_are_one_class(kernel: Kernel):
    pytest.importorskip("pydantic")
    kernel.check(
        "from pydantic import BaseModel\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\n"
        "class Box(BaseModel, Generic[T]):\n    value: T\n"
        "box = Box[int](value=1)"
    )
    kernel.check("%%distributed -n 1 --ui none --out box\n[isinstance(box, Box[int]), type(box) is Box[int]]")
    assert kernel.value("[*_.values[0], type(box) is Box[int]]") == [True] * 3
