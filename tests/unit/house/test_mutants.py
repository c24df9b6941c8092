"""The faults of `make mutants` can still be applied; nothing is run here."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, Fault, read_faults

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
    file, planted = fault.plant(ROOT)
    compile(planted, file, "exec")
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(file.read_text()))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_tests_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not function or function.partition("[")[0] in functions_of(file), test


SOURCE = """
class Queue:
    def take(self, most):
        # the oldest first
        self._items.sort()
        return (
            self._items[:most]
        )

    def drop(self):
        self._items.sort()
        self._items.clear()


def limit(count, most):
    if count > most:
        log(count)
    return count if count < most else most
"""


def planted(tmp_path: Path, where: str, **change: str) -> list[str]:
    """Return the lines of `SOURCE` that a fault adds."""
    (tmp_path / "queues.py").write_text(SOURCE)
    fault = Fault("a-fault", "1. whole", where, ("tests/unit/agent/test_agent_parts.py",), **change)
    file, source = fault.plant(tmp_path)
    assert file == tmp_path / "queues.py"
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    return [line.strip() for line in source.splitlines() if line not in before]


def test_a_fault_changes_code_by_its_syntax(tmp_path: Path) -> None:
    assert planted(tmp_path, "queues.Queue.take", replace="A[:B]", by="A[B:]") == ["return self._items[most:]"]
    assert planted(tmp_path, "queues.Queue.drop", remove="A.sort()") == ["pass"]
    assert planted(tmp_path, "queues", remove="A.sort()", beside="A.clear()") == ["pass"]
    assert planted(tmp_path, "queues.limit", replace="A if A < B else B", by="B if A < B else A") == [
        "return most if count < most else count"
    ]


@pytest.mark.parametrize(
    ("where", "change", "says"),
    [
        ("nowhere.limit", {"remove": "A()"}, "there is no module for nowhere.limit"),
        ("queues.Stack.take", {"remove": "A()"}, "there is no class or function Stack.take"),
        ("queues.Queue", {"remove": "A.sort()"}, "`A.sort()` matches 2 times, expected once"),
        ("queues.limit", {"replace": "A if A < A else A", "by": "A"}, "`A if A < A else A` matches 0 times"),
        # the call is there, and is a part of a statement
        ("queues.limit", {"remove": "count > most"}, "`count > most` matches 0 times"),
        ("queues", {"remove": "A.sort()", "beside": "A.append(B)"}, "`A.append(B)` is in a function 0 times"),
        ("queues.Queue", {"remove": "A.clear()", "beside": "A.sort()"}, "`A.sort()` is in a function 2 times"),
        ("queues.Queue", {"replace": "A.clear()"}, "neither `remove`, nor `replace` and `by`"),
    ],
)
def test_a_fault_whose_code_is_not_found_once_says_so(
    tmp_path: Path, where: str, change: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        planted(tmp_path, where, **change)
    assert str(raised.value).startswith(f"a-fault can't be planted in {where}: ")
