"""Secrets stay in memory: they are searched for in every file, command line and message of runs.

What a rank prints is the user's own and is not altered; the ranks here print none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import msgspec
import pytest
from kernels import Home, Kernel, Reply
from pool_client import PoolClient

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.pool_status import PoolStatus


class Marks:
    """Made-up secrets that can be found again."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def make(self, name: str) -> str:
        self.by_name[name] = f"zq{secrets.token_hex(12)}"
        return self.by_name[name]

    def found_in(self, data: bytes) -> list[str]:
        return [name for name, value in self.by_name.items() if value.encode() in data]


@pytest.fixture(scope="module")
def marks() -> Marks:
    return Marks()


@pytest.fixture(scope="module", params=["here", pytest.param("elsewhere", marks=pytest.mark.slow)])
def secret_home(request: pytest.FixtureRequest, marks: Marks) -> Iterator[Home]:
    home = Home()
    nothing = home.path / "nothing.txt"
    nothing.write_text("# no package: nothing has to be fetched\n")
    lacking = home.path / "lacking.txt"
    lacking.write_text("there-is-no-such-package-zq==1.0\n")
    home.environ |= {
        "HF_TOKEN": marks.make("os.environ"),
        "MLFLOW_TRACKING_USERNAME": "somebody",
        "MLFLOW_TRACKING_PASSWORD": marks.make("mlflow"),
        "MLFLOW_TRACKING_URI": f"http://somebody:{marks.make('mlflow uri')}@127.0.0.1:9",
        "SGPU_INDEX_URL": f"http://somebody:{marks.make('index')}@127.0.0.1:9/simple",
        "SGPU_TRACK": "all",
    }
    if request.param == "elsewhere":
        home.environ |= {"SGPU_ENVIRONMENTS": "built", "SGPU_ENV_VERSION": str(nothing)}
    yield home
    home.close()


@pytest.fixture(scope="module")
def notebook(secret_home: Home) -> Iterator[Kernel]:
    kernel = Kernel(secret_home)
    kernel.check("%load_ext sgpu_magic")
    yield kernel
    kernel.close()


@pytest.mark.slow
def test_secrets_are_nowhere(notebook: Kernel, secret_home: Home, marks: Marks):
    replies: list[Reply] = []

    def check(code: str) -> Reply:
        replies.append(notebook.run(code, timeout_s=90))
        return replies[-1]

    notebook.check(f"%env MY_API_KEY={marks.make('%env')}")
    given, typed, token = marks.make("--env"), marks.make("in the cell"), f"hf_{marks.make('token')}"
    # defined in a cell with a secret in it, whose source is sent along for tracebacks
    notebook.check(f"%env OTHER_TOKEN={marks.make('%env of a definition')}\ndef use(name):\n    return len(name)")
    check(
        f"%%distributed -n 2 --out got --env DB_PASSWORD={given}\n"
        # the magic's own output would be the rank's
        f"if False:\n    %env CELL_SECRET={typed}\n"
        "import os\n"
        f"literal = '{token}'\n"
        "names = ['HF_TOKEN', 'MY_API_KEY', 'DB_PASSWORD', 'MLFLOW_TRACKING_PASSWORD']\n"
        "got = [use(os.environ[name]) for name in names] + [len(literal)]\n"
        "print('done')"
    )
    assert replies[-1].status == "ok", replies[-1].evalue
    assert notebook.value("got") == [26, 26, 26, 26, 29]
    failing = (
        # values of --env are hidden, whatever they are and whatever their names
        f"%%distributed -n 2 --retries 1 --retry-on any --env DSN={marks.make('plain --env')}\n"
        "import os\n"
        f"value = '{marks.make('in a traceback')}'; os.environ['A'] = 'b'\n"
        "raise ValueError('no access with ' + os.environ['MY_API_KEY'] + ' and ' + os.environ['HF_TOKEN']\n"
        "                 + ' at ' + os.environ['DSN'])"
    )
    # known as a secret, so that the traceback's line has one
    notebook.check(f"%env LINE_SECRET={marks.by_name['in a traceback']}")
    assert check(failing).status == "error"
    assert "no access with *** and *** at ***" in replies[-1].text + replies[-1].evalue + replies[-1].traceback
    assert (
        check(
            f"%sgpu_connect -n 2 --env SESSION_TOKEN={marks.make('session')} --env PLACE={marks.make('plain')}"
        ).status
        == "ok"
    )
    check("%%distributed --out got\nimport os; got = len(os.environ['SESSION_TOKEN'])")
    assert notebook.value("got") == 26
    check("%%distributed\nimport os\nraise KeyError(os.environ['SESSION_TOKEN'] + os.environ['PLACE'])")
    check("%sgpu_disconnect")
    lacking = secret_home.path / "lacking.txt"
    refused = check(f"%%distributed -n 1 --env-version {lacking}\nprint('never')")
    assert refused.status == "error"
    check("%sgpu_status")

    leaks: list[str] = []
    for number, reply in enumerate(replies):
        shown = "".join(f"{output}" for output in reply.outputs) + reply.evalue + reply.traceback
        leaks += [f"reply {number} shows {name}" for name in marks.found_in(shown.encode())]
    leaks += in_files(secret_home, marks)
    leaks += [
        f"the command line of {process.command[:80]} has {name}"
        for process in secret_home.processes().values()
        for name in marks.found_in(process.command.encode())
    ]
    leaks += in_messages(secret_home, marks)
    assert leaks == []


def in_files(home: Home, marks: Marks) -> list[str]:
    found: list[str] = []
    searched = 0
    # IPython's own history and the notebook's own folder are the user's
    for top in (home.state, home.runtime, home.path / "tmp", home.path / "lock"):
        for path in top.rglob("*"):
            if path.is_file() and not path.is_symlink():
                searched += 1
                found += [f"{path} has {name}" for name in marks.found_in(path.read_bytes())]
    assert searched > 30
    return found


def in_messages(home: Home, marks: Marks) -> list[str]:
    """What the pool tells whoever asks: its status, and each run from its first event on."""
    found: list[str] = []
    client = PoolClient(home)
    try:
        status = client.pool.status(start=False)
        assert isinstance(status, PoolStatus)
        found += [f"the status has {name}" for name in marks.found_in(msgspec.json.encode(status))]
        runs = list(home.ledger())
        assert len(runs) >= 6
        for run_id in runs:
            run, _ = client.pool.attach(run_id)
            found += [f"the spec of {run_id} has {name}" for name in marks.found_in(msgspec.json.encode(run.spec))]
            for event, frames in EventFile(home.run_dir(run_id)).new_events():
                data = msgspec.msgpack.encode(event) + b"".join(frames)
                found += [f"{event.body} of {run_id} has {name}" for name in marks.found_in(data)]
            run.close()
    finally:
        client.close()
    return found


@pytest.mark.slow
def test_a_run_says_which_secrets_it_had_by_name(notebook: Kernel, secret_home: Home):
    notebook.check("%env MY_API_KEY=not-there-yet")
    notebook.check("%%distributed -n 1\npass")
    record = json.loads((secret_home.run_dir(list(secret_home.ledger())[-1]) / "run.json").read_text())["spec"]
    if secret_home.environ.get("SGPU_ENVIRONMENTS") == "built":
        assert {"HF_TOKEN", "MY_API_KEY", "MLFLOW_TRACKING_PASSWORD"} <= set(record["secret_names"])
    else:
        # the ranks have the whole environment
        assert "secret_names" not in record


def test_the_marks_would_be_found(marks: Marks):
    value = marks.make("planted")
    assert marks.found_in(f"x {value} y".encode()) == ["planted"]
