"""Completion and inspection on an idle rank: replies, speed, and forbidden side effects."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Session, Zygote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    zygote = Zygote()
    made = Session(zygote, 1)
    yield made.connect()
    made.leave()
    zygote.close()


def texts(session: Session, code: str) -> list[str]:
    answer = session.ranks[0].ask("complete", code)
    assert answer.problem is None
    return [match.text for match in answer.matches]


def test_names_and_attributes_are_completed(session: Session):
    session.run("import torch\nlearning_rate = 0.1\nlearning_steps = 10\ndef learn():\n    pass")
    answer = session.ranks[0].ask("complete", "x = 1\nlearn")
    assert {"learning_rate", "learning_steps", "learn"} <= {match.text for match in answer.matches}
    assert (answer.start, answer.end) == (6, 11)
    answer = session.ranks[0].ask("complete", "torch.nn.Linea + 1", cursor=14)
    assert "Linear" in " ".join(match.text for match in answer.matches)
    assert answer.end == 14
    assert texts(session, "no_such_thing_at_a") == []


def test_the_first_question_waits_for_no_import(session: Session):
    fresh = Session(session.ranks[0].zygote, 1).connect()
    fresh.run("import sys\nimported = set(sys.modules)")
    assert texts(fresh, "pri")
    fresh.run("imported_by_the_question = sorted(set(sys.modules) - imported)\nassert not imported_by_the_question")
    fresh.leave()


def test_an_object_is_described(session: Session):
    session.run('def train(epochs=3):\n    """Trains for a while."""\n    return epochs')
    answer = session.ranks[0].ask("inspect", "train(2)", cursor=3)
    assert "Trains for a while." in json.loads(answer.bundle)["text/plain"]
    assert "return" not in json.loads(answer.bundle)["text/plain"]
    answer = session.ranks[0].ask("inspect", "train(2)", cursor=3, detail=1)
    assert "return" in json.loads(answer.bundle)["text/plain"]
    assert session.ranks[0].ask("inspect", "nowhere").bundle == b""
    assert session.ranks[0].ask("inspect", "").bundle == b""


def test_names_are_those_that_cells_have_set(session: Session):
    fresh = Session(session.ranks[0].zygote, 1).connect()
    assert fresh.ranks[0].ask("names").names == ()
    fresh.run("import torch as T\nb = 1\n_private = 2\nb", names={"given": 3})
    assert fresh.ranks[0].ask("names").names == ("given", "T", "b", "_private")
    fresh.leave()


def test_nothing_of_the_users_runs(session: Session, tmp_path: Path):
    session.run(
        "import pathlib\n"
        f"trace = pathlib.Path({str(tmp_path / 'ran')!r})\n"
        "class Lazy:\n"
        "    @property\n"
        "    def data(self):\n"
        "        trace.touch()\n"
        "        return []\n"
        "    def __getattr__(self, name):\n"
        "        if not name.startswith('_'): trace.touch()\n"
        "        raise AttributeError(name)\n"
        "    def __getitem__(self, key):\n"
        "        trace.touch()\n"
        "lazy = Lazy()\n"
        "def call(): trace.touch()"
    )
    assert ".data" in " ".join(texts(session, "lazy.da"))
    for code in ("lazy.data.app", "lazy.other.x", "lazy[0].x", "lazy[", "call().x", "lazy.data["):
        session.ranks[0].ask("complete", code)
    session.ranks[0].ask("inspect", "lazy.data")
    session.ranks[0].ask("inspect", "call")
    assert not (tmp_path / "ran").exists()


def test_what_takes_too_long_is_given_up_and_the_rank_goes_on(session: Session):
    session.run("import time\nclass Slow:\n    def __dir__(self):\n        while True: time.sleep(0.01)\nslow = Slow()")
    answer = session.ranks[0].ask("complete", "slow.a")
    assert answer.problem or not answer.matches
    assert texts(session, "slo") == ["slow"]


def test_what_raises_is_no_harm(session: Session):
    session.run("class Odd:\n    def __dir__(self):\n        raise SystemExit(3)\nodd = Odd()")
    session.ranks[0].ask("complete", "odd.a")
    assert "1" in str(session.run("1")[0]["value"])
    assert session.ranks[0].printed == ""


def test_an_unknown_question(session: Session):
    assert session.ranks[0].ask("paint").problem == "a rank can't answer `paint`"
