"""A pool of another machine: really served on a port, reached over a line that breaks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from pool_client import ClientRun
from served_pools import RemoteUser, ServedPool
from tcp_proxy import Proxy
from waiting import eventually

from sgpu_magic.errors import KeyRefused, PoolError, RunUnknown
from sgpu_magic.protocol.events import OutputWritten, RunEnded
from sgpu_magic.protocol.states import RunState

COUNT = """
import pathlib, time
for number in range(200):
    print(number, flush=True)
    time.sleep(0.02)
"""
WAIT = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture(scope="module")
def served() -> Iterator[ServedPool]:
    made = ServedPool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ann(served: ServedPool) -> RemoteUser:
    return served.user("ann")


@pytest.fixture
def line(served: ServedPool) -> Iterator[Proxy]:
    made = Proxy(served.port)
    yield made
    made.close()


def numbers(run: ClientRun) -> list[int]:
    return [int(word) for word in run.printed.get(0, "").split()]


def test_a_run_on_another_machine(served: ServedPool, ann: RemoteUser):
    run = ann.client.begin("print('hello from', rank)\nrank * 10", names={"x": 1})
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed == {0: "hello from 0\n", 1: "hello from 1\n"}
    assert run.values == [0, 10]
    status = ann.client.pool.status()
    assert status is not None
    assert status.pool == "team"
    assert [(row.run_id, row.user) for row in status.runs] == [(run.run_id, "ann")]
