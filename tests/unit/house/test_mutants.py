"""The faults of `make mutants` can still be applied; nothing is run here."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter

import pytest
from mutants.__main__ import PACKAGE, ROOT, Fault, read_faults

FAULTS = read_faults()
LEAST = 40
LEAST_BY_TEST = 36
_FUNCTION = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    return frozenset(_FUNCTION.findall((ROOT / file).read_text()))


def test_there_are_enough_and_each_has_a_name() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(FAULTS) >= LEAST
    assert {fault.expected for fault in FAULTS} <= {"test", "test-all"}
    assert sum(fault.expected == "test" for fault in FAULTS) >= LEAST_BY_TEST


def test_each_promise_has_one() -> None:
    numbers = {fault.promise.partition(".")[0] for fault in FAULTS}
    assert numbers >= {str(number) for number in range(1, 11)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Fault) -> None:
    source = (ROOT / PACKAGE / fault.file).read_text()
    planted = fault.plant(source)
    assert planted != source
    ast.parse(planted)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_tests_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not function or function.partition("[")[0] in functions_of(file), test


def test_a_text_that_is_there_twice_can_not_be_planted() -> None:
    fault = Fault("twice", "1. whole", "agent/output.py", "a", "b", ("tests/unit/agent/test_agent_parts.py",))
    assert fault.plant("a = 1") == "b = 1"
    for source in ("a + a", "nothing"):
        with pytest.raises(ValueError, match=r"twice: `before` occurs [02] times in sgpu_magic/agent/output\.py"):
            fault.plant(source)
