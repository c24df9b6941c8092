"""Fixtures of the contract tests: each engine's pool in turn, a client of it, and the check for leaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_engines import ENGINES, PoolUnderTest
from homes import Home
from pool_client import PoolClient


@pytest.fixture(scope="module", params=list(ENGINES))
def module_pool(request: pytest.FixtureRequest) -> Iterator[PoolUnderTest]:
    home = Home()
    service = ENGINES[request.param](home)
    client = PoolClient(home)
    try:
        client.begin("pass", ranks=4).ended()
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
