"""Fixtures of the contract tests: each engine's pool in turn, a client of it, and the check for leaks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from contract_engines import ENGINES, FirstHome, PoolUnderTest
from homes import Home
from waiting import eventually

_RANKS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # other tests cover several agents, too; Ray's head takes a minute to start
    for item in items:
        if item.path.name == "test_contract.py" and "[local" not in item.nodeid:
            item.add_marker(pytest.mark.slow)
        if "[ray" in item.nodeid:
            # the first one waits for Ray's head, which takes two minutes on a busy machine
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module", params=list(ENGINES))
def module_pool(request: pytest.FixtureRequest) -> Iterator[PoolUnderTest]:
    home = FirstHome() if request.param == "ssh three" else Home()
    service = ENGINES[request.param](home)
    client = service.client()

    def has_room() -> bool:
        status = client.pool.status()
        if status is None:
            # the first run starts the pool
            return True
        inventory = status.inventory
        return not status.problem and (len(inventory.devices) if inventory.devices else inventory.cpu_slots) >= _RANKS

    try:
        eventually(has_room, 60, "not all nodes of the pool are there")
        # a first run, for what the service starts only when it is needed
        client.begin("blob = blob[::-1]", ranks=_RANKS, names={"blob": os.urandom(200_000)}, out=["blob:all"]).ended(
            120
        )
        yield PoolUnderTest(home, service, client)
    finally:
        client.close()
        service.close()
        home.close()


@pytest.fixture
def pool(module_pool: PoolUnderTest) -> Iterator[PoolUnderTest]:
    """The module's pool of each engine; after each test nothing is left of its runs."""
    yield module_pool
    module_pool.home.check_leaks()
