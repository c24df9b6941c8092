"""Which names are sent with a session's cells, by their values alone; and the text forms of ranks and cells."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from lazy_modules import torch

from sgpu_magic.errors import UsageError
from sgpu_magic.formatting import format_ranks
from sgpu_magic.magics.auto_mode import stays_here
from sgpu_magic.options.argparse_form import parse
from sgpu_magic.options.rank_lists import parse_ranks, ranks_from
from sgpu_magic.payload.digest import Fingerprint
from sgpu_magic.payload.names import names_bound, names_in
from sgpu_magic.payload.namespace import collect
from sgpu_magic.runs.sessions.comparison import Comparison
from sgpu_magic.runs.sessions.namespace_sync import Effects, NamespaceTracker, ShippingPlan, effects_of

ALL = (0, 1, 2, 3)


class Notebook:
    """A namespace with cells in a simulated session: the test supplies the ranks' replies."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.shipping = NamespaceTracker()
        self.there: frozenset[str] | None = frozenset()

    def run(self, source: str) -> None:
        """A plain cell, run to its end."""
        self.shipping.assigned(names_bound(source))
        exec(compile(source, "<cell>", "exec"), self.namespace)

    def reads(
        self,
        *names: str,
        ranks: Iterable[int] = ALL,
        stores: Iterable[str] | None = (),
        deletes: Iterable[str] = (),
        succeeded: bool = True,
    ) -> ShippingPlan:
        """Run a cell in the session; return what is sent with it."""
        ranks = tuple(ranks)
        plan = self.shipping.plan([name for name in names if name in self.namespace], self.namespace, ranks)
        for some, group in plan.before:
            self.shipping.record_sent(group, plan.prints, some)
        self.shipping.record_sent(plan.names, plan.prints, ranks)
        effects = Effects(None if stores is None else frozenset(stores), frozenset(deletes))
        self.shipping.record_ended(effects, plan, self.namespace, succeeded=succeeded, names_of=lambda rank: self.there)
        return plan

    def runs(self, source: str) -> ShippingPlan:
        """Run a cell with this text in the session; return what is sent with it."""
        names = names_in(source, transform=str)
        read = collect(names.read, self.namespace)
        plan = self.shipping.plan(read, self.namespace, ALL, absent=names.read - read.keys())
        self.shipping.record_sent(plan.names, plan.prints, ALL)
        self.shipping.record_ended(
            effects_of(names, self.namespace), plan, self.namespace, succeeded=True, names_of=lambda rank: self.there
        )
        return plan


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


# ---------------------------------------------------------------- which value counts


def test_a_name_goes_once_and_again_when_it_changed(notebook: Notebook):
    notebook.run("cfg = {'lr': 1}")
    assert notebook.reads("cfg").names == ("cfg",)
    assert notebook.reads("cfg").names == ()
    notebook.namespace["cfg"]["lr"] = 2
    assert notebook.reads("cfg").names == ("cfg",)


def test_assigning_the_same_value_anew_makes_it_the_newer_one(notebook: Notebook):
    notebook.run("step = 0")
    notebook.reads("step", stores=["step"])
    assert notebook.reads("step", stores=["step"]).names == ()
    notebook.run("step = 0")
    assert notebook.reads("step", stores=["step"]).names == ("step",)


def test_what_a_cell_has_set_is_not_overwritten(notebook: Notebook):
    notebook.run("model = 'untrained'")
    notebook.reads(stores=["model"])
    plan = notebook.reads("model")
    assert plan.names == ()
    assert plan.stay == {"model"}


def test_it_is_said_once_that_the_notebook_has_another(notebook: Notebook):
    notebook.run("model = 'untrained'")
    notebook.reads(stores=["model"])
    (note,) = notebook.reads("model").notes
    assert "`model` keeps the ranks' value" in note
    assert "%sgpu_push model" in note
    assert notebook.reads("model").notes == ()
    notebook.run("model = 'another'")
    assert notebook.reads("model").notes == ()


def test_a_name_that_came_to_be_after_the_ranks_own_is_newer(notebook: Notebook):
    notebook.reads(stores=["history"])
    notebook.run("history = []")
    assert notebook.reads("history").names == ("history",)


def test_what_came_back_from_the_ranks_is_no_newer(notebook: Notebook):
    notebook.reads(stores=["history"])
    notebook.namespace["history"] = [1, 2]
    notebook.shipping.set_on_ranks(["history"], notebook.namespace, ALL)
    plan = notebook.reads("history")
    assert (plan.names, plan.notes) == ((), ())
    notebook.namespace["history"].append(3)
    assert notebook.reads("history").names == ("history",)


def test_a_cell_that_failed_has_set_what_the_ranks_say(notebook: Notebook):
    notebook.run("a, b = 1, 2")
    notebook.there = frozenset({"a"})
    notebook.reads(stores=["a", "b"], succeeded=False)
    assert notebook.reads("a", "b").names == ("b",)


def test_a_cell_that_still_runs_counts_as_having_set_its_names(notebook: Notebook):
    notebook.run("x = 1\ny = 2")
    notebook.reads("y")
    effects, empty = Effects(frozenset({"x", "y"})), notebook.shipping.plan((), notebook.namespace, ALL)
    before = notebook.shipping.record_started(effects, empty, notebook.namespace)
    assert notebook.shipping.plan(["x", "y"], notebook.namespace, ALL).names == ()
    assert notebook.shipping.own_names(ALL) == {"x", "y"}
    # the cell never started
    notebook.shipping.undo_started(before)
    assert notebook.shipping.own_names(ALL) == set()
    assert notebook.reads("x", "y").names == ("x",)
    # the cell failed before it set one of them
    notebook.shipping.record_started(effects, empty, notebook.namespace)
    notebook.there = frozenset({"x"})
    notebook.shipping.record_ended(
        effects, empty, notebook.namespace, succeeded=False, names_of=lambda _: notebook.there
    )
    assert notebook.reads("x", "y").names == ("y",)


def test_a_cell_that_calls_exec_has_set_what_the_ranks_say(notebook: Notebook):
    notebook.run("a, b = 1, 2")
    notebook.there = frozenset({"a"})
    notebook.reads(stores=None)
    assert notebook.reads("a", "b").names == ("b",)


def test_a_rank_that_does_not_say_is_believed_to_have_all(notebook: Notebook):
    notebook.run("a = 1")
    notebook.there = None
    notebook.reads(stores=["a"], succeeded=False)
    assert notebook.reads("a").names == ()


def test_a_deleted_name_goes_again(notebook: Notebook):
    notebook.run("a = 1")
    notebook.reads("a", deletes=["a"])
    assert notebook.reads("a").names == ("a",)


def test_a_function_that_sets_a_global_sets_it_on_the_ranks(notebook: Notebook):
    notebook.run("model = None\ndef build():\n    global model\n    model = 'built'")
    notebook.there = frozenset({"build", "model"})
    notebook.reads("build")
    assert notebook.reads("model").names == ()


def test_what_a_function_reads_goes_along_when_it_changes(notebook: Notebook):
    notebook.run("cfg = 1\ndef train():\n    return cfg")
    assert set(notebook.reads("train").names) == {"train", "cfg"}
    notebook.namespace["cfg"] = 2
    assert notebook.reads("train").names == ("cfg",)


def test_a_failed_plain_cell_takes_nothing_back(notebook: Notebook):
    notebook.run("step = 0")
    notebook.reads("step", stores=["step"])
    before = notebook.shipping.assigned({"step"})
    notebook.shipping.not_assigned(before)
    assert notebook.reads("step").names == ()


# ---------------------------------------------------------------- ranks


def test_only_the_ranks_that_lack_a_name_get_it(notebook: Notebook):
    notebook.run("cfg = 1")
    notebook.reads("cfg", ranks=(0, 2))
    plan = notebook.reads("cfg")
    assert plan.names == ()
    assert plan.before == (((1, 3), ("cfg",)),)


def test_a_name_that_rank_0_has_set_goes_to_the_others_alone(notebook: Notebook):
    notebook.run("x = 1")
    notebook.reads(ranks=(0,), stores=["x"])
    assert notebook.reads("x").before == (((1, 2, 3), ("x",)),)


def test_a_restarted_rank_lacks_all_and_gets_what_was_shipped(notebook: Notebook):
    notebook.run("cfg, data = 1, 2")
    notebook.reads("cfg", "data", stores=["model"])
    notebook.reads("cfg", stores=["data"])
    assert notebook.shipping.own_names((1,)) == {"model", "data"}
    assert notebook.shipping.restarted((1,)) == {("cfg",): (1,)}
    assert notebook.reads("cfg").before == (((1,), ("cfg",)),)


def test_a_value_that_differs_between_ranks_is_told_once(notebook: Notebook):
    notebook.run("lr = 1")
    notebook.reads("lr", stores=["lr"])
    notebook.shipping.restarted((1,))
    plan = notebook.reads("lr")
    assert plan.before == (((1,), ("lr",)),)
    (note,) = plan.notes
    assert note.startswith("warning: `lr` differs between ranks: rank 1 got the notebook's value, ranks 0, 2, 3 kept")
    assert notebook.reads("lr").notes == ()


def test_a_value_that_was_told_as_the_ranks_own_is_told_as_differing_after_a_restart(notebook: Notebook):
    notebook.run("lr = 1")
    notebook.reads("lr", stores=["lr"])
    (note,) = notebook.reads("lr").notes
    assert note.startswith("warning: `lr` keeps the ranks' value")
    notebook.shipping.restarted((1,))
    (note,) = notebook.reads("lr").notes
    assert note.startswith("warning: `lr` differs between ranks: rank 1 got the notebook's value, ranks 0, 2, 3 kept")
    assert notebook.reads("lr").notes == ()


def test_a_value_that_was_pushed_is_had_from_a_rank_that_stays(notebook: Notebook):
    notebook.shipping.set_on_ranks(["lr", "seed"], {}, ALL, pushed=True)
    notebook.reads(stores=["seed"])
    assert notebook.shipping.pushed_names({0, 1}) == {2: ["lr"]}
    assert notebook.shipping.pushed_names(ALL) == {}


def test_what_did_not_arrive_goes_again(notebook: Notebook):
    notebook.run("cfg = 1")
    plan = notebook.reads("cfg")
    notebook.shipping.record_not_arrived(plan.names, (2,))
    assert notebook.reads("cfg").before == (((2,), ("cfg",)),)


# ---------------------------------------------------------------- related values


def test_what_shares_objects_with_something_new_goes_along(notebook: Notebook):
    notebook.namespace["model"] = model = torch.nn.Linear(3, 3)
    notebook.reads("model")
    notebook.namespace["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = notebook.reads("model", "optimizer")
    assert set(plan.names) == {"model", "optimizer"}
    assert "shares objects with `optimizer`" in plan.notes[0]


def test_the_ranks_own_model_is_not_overwritten_for_an_optimizer(notebook: Notebook):
    notebook.namespace["model"] = model = torch.nn.Linear(3, 3)
    notebook.reads("model", stores=["model"])
    notebook.namespace["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    assert notebook.reads("model", "optimizer").names == ("optimizer",)


def test_two_models_of_one_class_are_two(monkeypatch: pytest.MonkeyPatch):
    namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    body = "    tags = ['a']\n    def forward(self, x: int, seen=[1]) -> int:\n        return x"
    exec(f"class Net(torch.nn.Module):\n{body}", namespace)
    monkeypatch.setitem(sys.modules["__main__"].__dict__, "Net", namespace["Net"])
    first, second = (Fingerprint(namespace["Net"](), namespace) for _ in range(2))
    assert not first.shares_with(second)
    assert first.shares_with(first)


# ---------------------------------------------------------------- what functions on the ranks read


def test_what_a_function_of_an_earlier_cell_reads_goes_along_when_it_changes(notebook: Notebook):
    notebook.run("lr, data = 0.1, [1]")
    notebook.runs("def train():\n    return lr, [len(data) for _ in data]\nstep = 0")
    notebook.namespace["lr"] = 0.2
    assert notebook.runs("train()").names == ("lr",)
    notebook.namespace["data"].append(2)
    assert notebook.runs("print(lr, rank)").names == ()
    assert notebook.runs("print(rank, lr, train())").names == ("data",)
    notebook.namespace["data"].append(3)
    assert notebook.runs("print(lr, rank)").names == ()
    assert notebook.runs("train()").names == ("data",)
    assert notebook.runs("train()").names == ()


def test_through_functions_classes_and_objects_of_earlier_cells(notebook: Notebook):
    notebook.run("lr, seed, scale = 0.1, 1, 2")
    notebook.runs("class Net:\n    seed = seed\n    def forward(self, x=seed):\n        return x * scale")
    notebook.runs("net = Net()\nnet.hook = lambda: lr")
    notebook.runs("def both():\n    return net.forward() + net.hook()")
    notebook.namespace["scale"] = 3
    notebook.namespace["seed"] = 2
    notebook.namespace["lr"] = 0.2
    # `seed` was read when the class was made
    assert set(notebook.runs("both()").names) == {"scale", "lr"}


def test_a_function_of_the_notebook_that_calls_one_of_the_ranks(notebook: Notebook):
    notebook.run("lr = 0.1\ndef twice():\n    return train(), train()")
    notebook.runs("def train():\n    return lr")
    notebook.namespace["lr"] = 0.2
    assert set(notebook.runs("twice()").names) == {"lr", "twice"}


# ---------------------------------------------------------------- names that the ranks keep


def test_a_name_that_the_ranks_keep(notebook: Notebook):
    notebook.run("data = [1]\ndef train():\n    return data")
    notebook.shipping.keep(["data"])
    assert set(notebook.reads("train").names) == {"train", "data"}
    notebook.namespace["data"].append(2)
    plan = notebook.reads("train")
    assert (plan.names, plan.stay) == ((), {"train", "data"})
    notebook.run("data = [3]")
    assert notebook.reads("train", "data").names == ()
    # a new rank gets it nevertheless
    notebook.shipping.restarted((1,))
    assert set(notebook.reads("data").before) == {((1,), ("data",))}
    notebook.shipping.unkeep()
    assert notebook.reads("train").names == ("data",)
    notebook.namespace["data"].append(2)
    assert notebook.reads("train").names == ("data",)


def test_a_name_that_is_kept_is_not_looked_at(notebook: Notebook):
    class Costly:
        pickled = 0

        def __reduce__(self) -> Any:
            Costly.pickled += 1
            return int, ()

    notebook.namespace["data"] = Costly()
    notebook.reads("data")
    notebook.shipping.keep(["data"])
    before = Costly.pickled
    notebook.reads("data", stores=["data"])
    notebook.shipping.set_on_ranks(["data"], notebook.namespace, ALL)
    assert Costly.pickled == before


# ---------------------------------------------------------------- slow comparisons


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


def test_a_long_comparison_is_shown_and_told_once(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr("sgpu_magic.runs.sessions.comparison.time.monotonic", lambda: clock.now)
    shown: list[str] = []
    known: set[str] = set()

    def compare() -> str:
        comparison = Comparison("walk", shown.append)
        comparison.name("lr")
        comparison.hashed(8)
        comparison.name("rows")
        for _ in range(5):
            clock.now += 0.5
            comparison.hashed(500_000_000)
        names, sentence = comparison.end(known)
        known.update(names)
        return sentence

    sentence = compare()
    assert [text[: text.find(".")] for text in shown[:2]] == [
        "hashing `rows` to find out whether session walk has it as it is now: 1",
        "hashing `rows` to find out whether session walk has it as it is now: 2",
    ]
    assert shown[-1] == ""
    for text in (shown[0], sentence):
        assert "--exclude rows" in text
        assert 'session.keep("rows")' in text
    assert sentence.startswith("hashing `rows` (2.5 GB) to find changes took 2.5 s before this cell.")
    assert compare() == ""


def test_a_short_comparison_says_nothing(notebook: Notebook):
    notebook.run("data = [1]")
    shown: list[str] = []
    plan = notebook.shipping.plan(["data"], notebook.namespace, ALL, comparison=Comparison("walk", shown.append))
    assert (shown, plan.notes) == ([], ())


# ---------------------------------------------------------------- values


def test_an_equal_array_elsewhere_is_the_same():
    value = np.arange(1_000_000)
    assert Fingerprint(value, {}).digest == Fingerprint(value.copy(), {}).digest


def test_a_value_that_cannot_be_pickled_has_no_digest():
    assert Fingerprint(sys._getframe(), {}).digest is None


# ---------------------------------------------------------------- text forms of cells and ranks


def test_names_that_a_cell_certainly_binds():
    source = "a = 1\nif a:\n    b = c = 2\nelse:\n    b = 3\nfor i in range(3): pass\ndef f(): pass\nimport os.path\n"
    assert names_bound(source) == {"a", "b", "f", "os"}


def test_names_that_a_cell_deletes():
    assert names_in("del a, b.c\ndel d; d = 1\nif a: del e").deleted == {"a", "e"}


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("3, 1", (1, 3)), ("1,1-2", (1, 2)), ("0,", (0,))]
)
def test_lists_of_ranks(text: str, ranks: tuple[int, ...]):
    assert ranks_from(text, 6, "session s") == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "-", "1;2", "99999", "1--2", "[]", "::0", "1:2:3:4", "4096"])
def test_what_is_no_list_of_ranks(text: str):
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks("--ranks", text)


@pytest.mark.parametrize(("ranks", "found"), [(None, ()), (2, (2,)), ([3, 0], (0, 3)), ("1-2", (1, 2)), (range(4), ())])
def test_ranks_from_python(ranks: Any, found: tuple[int, ...]):
    assert ranks_from(ranks, 4, "session s") == found


@pytest.mark.parametrize("ranks", [4, [0, 4], "4", [], -5, "4:"])
def test_ranks_that_a_session_does_not_have(ranks: Any):
    with pytest.raises(UsageError, match="session s has ranks 0 to 3"):
        ranks_from(ranks, 4, "session s")


def test_ranks_in_words():
    assert (format_ranks((2,)), format_ranks((0, 3))) == ("rank 2", "ranks 0, 3")


@pytest.mark.parametrize(
    ("line", "ranks"),
    [("0", (0,)), ("0,2-3 --ui text", (0, 2, 3)), ("0, 2 --out x", (0, 2)), ("1", (1,)), ("::2 --group", (0, 2, 4))],
)
def test_the_rank_magics_line(line: str, ranks: tuple[int, ...]):
    options = parse(line, "%%rank")
    assert options is not None
    assert ranks_from(options.selected, 6, "session s") == ranks


@pytest.mark.parametrize("line", ["", "--ui text", "0 --ranks 1", "0 --fresh", "x"])
def test_what_the_rank_magic_does_not_take(line: str):
    with pytest.raises(UsageError, match="rank"):
        parse(line, "%%rank")


def test_fresh_and_ranks_contradict():
    with pytest.raises(UsageError, match="--fresh starts new ones"):
        parse("--fresh --ranks 1")


@pytest.mark.parametrize(
    "cell",
    [
        "%%time\nx = 1",
        "\n%%distributed\nx = 1",
        "%sgpu_status\n# a word\n\n%pip install torch",
        "s = %sgpu_connect -n 2",
        "%env A=1",
        "%load_ext sgpu_magic",
        "# only words",
        "",
    ],
)
def test_cells_that_stay_in_the_notebook(cell: str):
    assert stays_here(cell.splitlines())


@pytest.mark.parametrize("cell", ["x = 1", "%sgpu_status\nx = 1", "%matplotlib inline", "!ls", "\n\nprint('%%')"])
def test_cells_that_go_to_the_ranks(cell: str):
    assert not stays_here(cell.splitlines())


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ("all", ()),
        (":", ()),
        ("-1", (3,)),
        (-1, (3,)),
        ("[0, 2]", (0, 2)),
        ([-1, 0], (0, 3)),
        ("[-2]", (2,)),
        ("::2", (0, 2)),
        ("[1:]", (1, 2, 3)),
        ("0:4:3,1", (0, 1, 3)),
        (slice(None, 2), (0, 1)),
    ],
)
def test_ranks_as_ipyparallel_names_them(ranks: Any, found: tuple[int, ...]):
    assert ranks_from(ranks, 4, "session s") == found
