"""For any input from a process or file, a reader raises only its documented exceptions.

`READERS` has an entry for each place in the package that decodes data; a place without one fails the first test. So
does code that calls a decoder of msgspec, `json` or `tomllib` by itself instead of `sgpu_magic.wire.decoding`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_messages import ESCAPE, hostile_json, hostile_msgpack, hostile_toml

import sgpu_magic
from sgpu_magic.agent import blobs
from sgpu_magic.agent.watch import stack_taking
from sgpu_magic.cli import copying, pool_checks
from sgpu_magic.cli.headless import cell_end, formats
from sgpu_magic.client import ledger as client_ledger
from sgpu_magic.client import mirror, pools_file, run_files, this_machine, upload_files
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import SgpuError, UsageError
from sgpu_magic.files import atomic_file, run_directory
from sgpu_magic.functions.compat.notebook import execution
from sgpu_magic.nodes.ray import agent_listener, deploy, driver, uplink
from sgpu_magic.nodes.ssh import link as ssh_link
from sgpu_magic.options import job_form, notebook_job
from sgpu_magic.packages import distributions, lock, named_environments, requirement_files
from sgpu_magic.packages.node import store
from sgpu_magic.panel import kernel_actions, orders, past_runs
from sgpu_magic.payload import notebook_text
from sgpu_magic.pool import clients
from sgpu_magic.pool import ledger as pool_ledger
from sgpu_magic.runs.choice import keeper, known_notebooks, schema
from sgpu_magic.runs.replay import recorded
from sgpu_magic.ssh import machines as ssh_machines
from sgpu_magic.system import secure_sockets
from sgpu_magic.tracking import in_rank_cell
from sgpu_magic.views import output, rank_models
from sgpu_magic.views.live import comm, messages
from sgpu_magic.wire import attachments, codec, decoding
from sgpu_magic.wire.decoding import JsonDecoder, MsgpackDecoder
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.node import AgentReady
from sgpu_magic.worker.preload import preloading

PACKAGE = Path(sgpu_magic.__file__).parent
BORDER = {
    "decode_json",
    "decode_msgpack",
    "decode_toml",
    "load_json",
    "convert",
    "JsonDecoder",
    "MsgpackDecoder",
    "Decoder",
}
FORBIDDEN = {
    "msgspec.json.decode",
    "msgspec.json.Decoder",
    "msgspec.msgpack.Decoder",
    "msgspec.convert",
    "msgspec.toml.decode",
    "msgspec.yaml.decode",
    "json.load",
    "json.loads",
    "tomllib.load",
    "tomllib.loads",
}
# run by Pythons with only the standard library; each catches its decoder's exceptions
STANDARD_LIBRARY_ONLY = {"packages/distributions.py:_from_direct_url: json.loads"}
# data from this package's own processes: command lines, variables, standard input, and the programs they run
OWN = {
    "agent/__main__.py:main": "the order of the engine that starts it",
    "cli/python_checks.py:probe": "what a program of ours printed",
    "cli/sync.py:_send": "what a program of ours printed",
    "cli/ray_deployment.py:main": "a variable that `sgpu pool deploy` sets",
    "cli/ray_deployment.py:job_options": "an option of a command",
    "magics/completion.py:RankQuestions.inspect": "an answer of a rank, shown by the kernel's own `inspect`",
    "nodes/ray/agent_actor.py:Holder.__init__": "the engine's order, in its actor",
    "nodes/ray/cluster.py:inspect_node": "what a task of ours found on a node",
    "nodes/ray/uplink.py:Uplink.__init__": "the engine's order, in its actor",
    "nodes/ssh/node_end.py:node_settings": "the engine's order, in its far end",
    "packages/node/builder.py:_path_of": "what a program of ours printed",
    "packages/node/refusals.py:sizes_in": "a lock that was checked when it was made",
    "packages/named_environments.py:base_list": "a file of this package",
    "pool/__main__.py:_run": "the order of the client that starts it",
    "runs/replay/circumstances.py:_probe": "what a program of ours printed",
    "server/mlflow_ui.py:_PROBED": "what a program of ours printed",
    "runtime.py:upload_path": "a variable that the agent sets",
    "system/process_settings/rank_settings.py:RankSettings._apply": "settings that the kernel encoded",
    "system/process_settings/rank_settings.py:RankSettings._imported": "settings that the kernel encoded",
    "tracking/__main__.py:main": "the order of the pool that starts it",
    "tracking/__main__.py:sync": "the order of the command that starts it",
    "files/tracking_progress.py:Progress.tracked": "a record that has its type",
    "wire/codec.py:printable": "a record that has its type",
    "worker/cell/widgets.py:_Comms.deliver": "a message that the kernel encoded",
    "worker/group/renewal.py:_exchange_groups": "the record of another rank of the run",
    "worker/ray/node.py:main": "an argument of a program of ours",
    "worker/standalone.py:run": "the directory that the user names",
    "worker/standalone.py:_settings": "the same",
}

Feed = Callable[[bytes, Path], object]


@dataclass(frozen=True)
class Reader:
    """A place that decodes data.

    Attributes:
        feed: Gives it data; the second argument is a path that it may use.
        hostile: Data that raises many kinds of exceptions in an unguarded decoder.
        raises: What it documents.
    """

    feed: Feed
    hostile: Callable[[], list[bytes]]
    raises: tuple[type[Exception], ...] = (msgspec.DecodeError,)


def decoder(decodes: MsgpackDecoder[Any]) -> Reader:
    return Reader(lambda data, _: decodes.decode(data), hostile_msgpack)


def json_decoder(decodes: JsonDecoder[Any]) -> Reader:
    return Reader(lambda data, _: decodes.decode(data), hostile_json)


def plain(data: bytes) -> object:
    """Return a front end's message with this data."""
    try:
        return decoding.load_json(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace")


def nested() -> object:
    """Return plain data that is nested beyond Python's recursion limit."""
    value: object = None
    for _ in range(5000):
        value = [value]
    return value


def of_file(read: Callable[[Path], object], name: str = "file") -> Feed:
    def feed(data: bytes, path: Path) -> object:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o600)
        return read(file)

    return feed


def of_value(read: Callable[[object], object]) -> Feed:
    def feed(data: bytes, path: Path) -> object:
        read({"n": 1, "zzz": nested()})
        read(nested())
        return read(plain(data))

    return feed


def of_variable(name: str, read: Callable[[], object]) -> Feed:
    def feed(data: bytes, path: Path) -> object:
        os.environ[name] = data.decode(errors="surrogateescape").replace("\0", "")
        try:
            return read()
        finally:
            del os.environ[name]

    return feed


def settings_in(path: Path) -> Settings:
    return msgspec.structs.replace(Settings(), state_dir=str(path))


def in_config(read: Callable[[], object]) -> Feed:
    def feed(data: bytes, path: Path) -> object:
        file = path / "config.toml"
        file.write_bytes(data)
        earlier = os.environ.get("SGPU_CONFIG")
        os.environ["SGPU_CONFIG"] = str(file)
        try:
            return read()
        finally:
            del os.environ["SGPU_CONFIG"]
            if earlier is not None:
                os.environ["SGPU_CONFIG"] = earlier

    return feed


def feed_events(data: bytes, path: Path) -> object:
    run_directory.read_spec(path)
    (path / "events.msgpack").write_bytes(b"\x01\0\0\0" + len(data).to_bytes(8, "little") + data)
    assert run_directory.read_spec(path) is None
    (path / "events.msgpack").write_bytes(data)
    return run_directory.read_spec(path)


def feed_stream(decodes: codec.Decoder[Any]) -> Reader:
    def feed(data: bytes, path: Path) -> object:
        framed = b"\x01\0\0\0" + len(data).to_bytes(8, "little") + data
        return list(codec.FrameReader(decodes).feed(framed))

    return Reader(feed, hostile_msgpack)


def feed_job_file(data: bytes, path: Path) -> None:
    for kind in ("job.json", "job.toml", "job.yaml"):
        file = path / kind
        file.write_bytes(data)
        try:
            job_form.read_job_file(file)
        except UsageError:
            continue


def fed_run(read: Callable[[Any], object]) -> Feed:
    """Use the data as the `run.json` of a run whose files come from a pool."""

    def feed(data: bytes, path: Path) -> object:
        (path / "run.json").write_bytes(data)
        listed = SimpleNamespace(files=[SimpleNamespace(name="run.json")])
        return read(SimpleNamespace(bring=lambda name: path / name, list=lambda: listed))

    return feed


def sent_run(file: Path) -> object:
    return mirror.sent_run(settings_in(file.parents[1]), MIRRORED)


def url_of(file: Path) -> str:
    return past_runs.RunFilesOfPool._url(SimpleNamespace(_runs_path=file.parents[1]), "run")  # pyright: ignore


def row(data: bytes) -> dict[str, Any]:
    text = data.decode(errors="surrogateescape")
    return {"run_id": "a" * 8, "uuids": text, "state": text, "submitted_at": text, "name": text}


PLAIN = distributions.Distribution("a", "1", distributions.Kind.REGISTRY)
MIRRORED = "abcd1234abcd1234"
READERS: dict[str, Reader] = {
    "agent/blobs.py:_states_decoder": decoder(blobs._states_decoder),
    "agent/watch/stack_taking.py:parse_py_spy": Reader(
        lambda data, _: stack_taking.parse_py_spy(data, 1), hostile_json, ()
    ),
    "cli/copying.py:_record": Reader(fed_run(copying._record), hostile_json),
    "cli/headless/cell_end.py:read_end": Reader(
        lambda data, _: cell_end.read_end({"data": {"text/plain": repr(data.decode(errors="replace"))}}),
        hostile_json,
        (),
    ),
    "nodes/ssh/link.py:from_node": decoder(ssh_link.from_node),
    "nodes/ssh/link.py:to_node": decoder(ssh_link.to_node),
    "ssh/machines.py:_decoder": Reader(lambda data, _: ssh_machines.from_json(data), hostile_json),
    "cli/pool_checks.py:read_finding": Reader(
        lambda data, _: pool_checks.read_finding(data.decode(errors="replace")), hostile_json, ()
    ),
    "cli/headless/formats.py:kernel_name": Reader(
        of_file(lambda file: formats.kernel_name(file, formats.Form.IPYNB)), hostile_json, (UsageError,)
    ),
    "client/run_files.py:_bring_record": Reader(fed_run(run_files._bring_record), hostile_json),
    "client/ledger.py:_summary": Reader(
        lambda data, _: client_ledger._summary(row(data), held=True), hostile_json, (msgspec.DecodeError, ValueError)
    ),
    "client/mirror.py:_decoder": Reader(
        of_file(
            lambda file: mirror.sent_run(settings_in(file.parents[1]), MIRRORED), f"{mirror.SENT}/{MIRRORED}.msgpack"
        ),
        hostile_msgpack,
    ),
    "client/pools_file.py:parse": Reader(of_file(pools_file.read_pools), hostile_toml, (UsageError,)),
    "config/__init__.py:_parse": Reader(in_config(load_settings), hostile_toml, (UsageError,)),
    "config/__init__.py:settings_in_file": Reader(in_config(this_machine.stated_settings), hostile_toml, (UsageError,)),
    "client/upload_files.py:_decoder": decoder(upload_files._decoder),
    "files/run_directory.py:_decoder": Reader(feed_events, hostile_msgpack),
    "files/atomic_file.py:read_json": Reader(
        of_file(lambda file: atomic_file.read_json(file, Settings)), hostile_json, ()
    ),
    "functions/compat/notebook/execution.py:Notebook.run": Reader(
        of_file(execution._cells_of, "a.ipynb"), hostile_json, (UsageError,)
    ),
    "functions/compat/notebook/execution.py:_cells_of": Reader(
        of_file(execution._cells_of, "a.ipynb"), hostile_json, (UsageError,)
    ),
    "nodes/ray/agent_listener.py:_from_node": decoder(agent_listener._from_node),
    "nodes/ray/deploy.py:JobsApi._decoded": json_decoder(JsonDecoder(dict[str, str])),
    "nodes/ray/deploy.py:_headers": Reader(
        lambda data, _: deploy._headers({"RAY_JOB_HEADERS": data.decode(errors="replace")}), hostile_json, (UsageError,)
    ),
    "nodes/ray/driver.py:to_cluster": decoder(driver.to_cluster),
    "nodes/ray/driver.py:from_cluster": decoder(driver.from_cluster),
    "nodes/ray/uplink.py:_to_node": decoder(uplink._to_node),
    "nodes/ray/uplink.py:_raw": decoder(uplink._raw),
    "options/job_form.py:read_job_file": Reader(feed_job_file, hostile_json),
    "options/job_form.py:read_mapping": Reader(feed_job_file, hostile_toml),
    "options/notebook_job.py:_decoded": Reader(
        of_variable(notebook_job.PARAMETERS_VARIABLE, notebook_job.parameters_of_process), hostile_json, (UsageError,)
    ),
    "packages/distributions.py:_from_direct_url": Reader(
        lambda data, _: distributions._from_direct_url(PLAIN, data),
        hostile_json,
        (),
    ),
    "packages/lock.py:_valid": Reader(
        lambda data, _: lock._valid(lock.Lock(pylock=data.decode(errors="replace"))), hostile_toml, ()
    ),
    "packages/named_environments.py:load": Reader(
        of_file(
            lambda file: named_environments.load(settings_in(file.parents[2]), "mine"),
            f"{named_environments.saved_path(Settings()).name}/mine/{named_environments._DESCRIPTION}",
        ),
        hostile_json,
        (UsageError,),
    ),
    "packages/node/store.py:decode_order": Reader(lambda data, _: store.decode_order(data), hostile_json),
    "packages/node/store.py:decode_update": Reader(lambda data, _: store.decode_update(data), hostile_json),
    "packages/requirement_files.py:_read_pylock": Reader(
        of_file(requirement_files.read_file, "pylock.toml"), hostile_toml, (UsageError,)
    ),
    "panel/kernel_actions.py:KernelActions.answered": Reader(
        of_value(lambda content: kernel_actions.KernelActions.answered(SimpleNamespace(), content)),  # pyright: ignore
        hostile_json,
        (),
    ),
    "panel/orders.py:orders": json_decoder(orders.orders),
    "panel/orders.py:Page.execute_decoded": Reader(
        of_value(lambda content: orders.Page.execute_decoded(SimpleNamespace(), content)),  # pyright: ignore
        hostile_json,
        (),
    ),
    "panel/past_runs.py:RunFilesOfPool._url": Reader(
        of_file(url_of, f"run/{TRACKING}"),  # pyright: ignore
        hostile_json,
        (),
    ),
    "payload/notebook_text.py:_percent_cell": Reader(
        lambda data, _: notebook_text.percent_cells(f"# %% tags={data.decode(errors='replace')}\n1\n"), hostile_json, ()
    ),
    "pool/clients.py:_clients": Reader(of_file(clients.read_clients), hostile_toml, (UsageError,)),
    "pool/ledger.py:_summary_of": Reader(lambda data, _: pool_ledger._summary_of(row(data)), hostile_json),
    "runs/choice/known_notebooks.py:KnownNotebooks._read": Reader(
        of_file(lambda file: known_notebooks.KnownNotebooks(file.parent)._read(), known_notebooks.NOTEBOOKS_FILE),
        hostile_json,
        (),
    ),
    "runs/choice/keeper.py:_notebooks": Reader(of_file(lambda file: keeper.read_notebook(file, 1)), hostile_json, ()),
    "runs/choice/keeper.py:read_notebook": Reader(
        lambda data, path: of_file(lambda file: keeper.read_notebook(file, 1))(
            b'{"metadata": {"sgpu": ' + (data or b"null") + b"}}", path
        ),
        hostile_json,
        (),
    ),
    "runs/choice/schema.py:read_kept": Reader(of_value(schema.read_kept), hostile_json, ()),
    "runs/replay/recorded.py:_read_record": Reader(
        of_file(lambda file: recorded._read_record(file.parent), "run.json"), hostile_json, (UsageError,)
    ),
    "system/secure_sockets.py:read_key_pair": Reader(
        of_file(secure_sockets.read_key_pair), hostile_toml, (UsageError,)
    ),
    "tracking/in_rank_cell.py:_decoder": decoder(in_rank_cell._decoder),
    "views/live/comm.py:question_of": Reader(
        of_value(lambda content: comm.question_of(content, lambda _answer: None)), hostile_json, ()
    ),
    "views/live/messages.py:questions": json_decoder(messages.questions),
    "views/output.py:_mime": Reader(lambda data, _: output._decode(data, 1), hostile_json, ()),
    "views/rank_models.py:_object": Reader(
        lambda data, _: rank_models._object(data), hostile_json, (ValueError, TypeError)
    ),
    "wire/attachments.py:_decoder": Reader(
        lambda data, _: attachments.manifest_in(data), hostile_msgpack, (attachments.ManifestUnusable,)
    ),
    "wire/codec.py:Decoder.decode": decoder(codec.client_messages),
    "wire/codec.py:_refusable": decoder(codec.to_agent),
    "wire/codec.py:_replaced": decoder(codec.from_agent),
    "wire/codec.py:client_messages": decoder(codec.client_messages),
    "wire/codec.py:pool_messages": decoder(codec.pool_messages),
    "wire/codec.py:to_bulk": decoder(codec.to_bulk),
    "wire/codec.py:from_bulk": decoder(codec.from_bulk),
    "wire/codec.py:to_agent": feed_stream(codec.to_agent),
    "wire/codec.py:from_agent": feed_stream(codec.from_agent),
    "wire/codec.py:to_zygote": feed_stream(codec.to_zygote),
    "wire/codec.py:from_zygote": feed_stream(codec.from_zygote),
    "wire/codec.py:to_rank": feed_stream(codec.to_rank),
    "wire/codec.py:from_rank": feed_stream(codec.from_rank),
    "wire/codec.py:to_line": feed_stream(codec.to_line),
    "wire/codec.py:from_line": feed_stream(codec.from_line),
    "wire/codec.py:to_tracker": feed_stream(codec.to_tracker),
    "wire/codec.py:from_tracker": feed_stream(codec.from_tracker),
    "worker/preload/preloading.py:read_trial": Reader(lambda data, _: preloading.read_trial(data), hostile_msgpack),
    "worker/process/position.py:_decoder": json_decoder(JsonDecoder(dict[str, int])),
    "worker/ray/node.py:_words": json_decoder(JsonDecoder(dict[str, int])),
}


# ---------------------------------------------------------------- every place has an entry


class _Places(ast.NodeVisitor):
    """Collects the calls that decode, by function or module-level name."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.decodes: list[str] = []
        self.forbidden: list[str] = []

    def _inside(self, name: str, node: ast.AST) -> None:
        self.scope.append(name)
        self.generic_visit(node)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node.name, node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets[0], node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assigned(node.target, node)

    def _assigned(self, target: ast.expr, node: ast.AST) -> None:
        if not self.scope and isinstance(target, ast.Name):
            self._inside(target.id, node)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node) in FORBIDDEN:
            self.forbidden.append(f"{'.'.join(self.scope)}: {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(called, ast.Name) and called.id in BORDER:
            self.decodes.append(".".join(self.scope))
        self.generic_visit(node)


def test_every_place_that_decodes_has_an_entry_here():
    decodes: set[str] = set()
    forbidden: list[str] = []
    words = {*BORDER, *(name.partition(".")[0] for name in FORBIDDEN)}
    for path in PACKAGE.rglob("*.py"):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if name == "wire/decoding.py" or not any(word in text for word in words):
            continue
        places = _Places()
        places.visit(ast.parse(text))
        decodes |= {f"{name}:{context}" for context in places.decodes}
        # annotations only name types; calls and references decode
        found = {f"{name}:{context}" for context in places.forbidden}
        decodes |= {context.partition(": ")[0] for context in found & STANDARD_LIBRARY_ONLY}
        forbidden += found - STANDARD_LIBRARY_ONLY
    assert not forbidden, "decode with sgpu_magic.wire.decoding, which raises DecodeError only"
    assert decodes == READERS.keys() | OWN.keys()
    assert not READERS.keys() & OWN.keys()


# ---------------------------------------------------------------- only documented exceptions


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_reader_raises_what_it_documents(name: str, tmp_path: Path):
    reader = READERS[name]
    for data in reader.hostile():
        _fed(reader, data, tmp_path)


TEXT = st.text() | st.just(ESCAPE + "\ue001")
FUZZED = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | st.just("type"), inner, max_size=4),
        max_leaves=12,
    ).flatmap(
        lambda value: st.sampled_from((msgspec.msgpack.encode, msgspec.json.encode)).flatmap(
            lambda encode: st.just(_or_none(encode, value)).flatmap(
                lambda data: st.integers(0, len(data)).map(lambda cut: data[: len(data) - cut // 2])
            )
        )
    ),
)


def _or_none(encode: Callable[[object], bytes], value: object) -> bytes:
    try:
        return encode(value)
    except UnicodeEncodeError:
        return b""


@settings(max_examples=examples(90), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=FUZZED)
def test_no_reader_raises_anything_else_for_any_data(data: bytes, tmp_path: Path):
    for reader in READERS.values():
        _fed(reader, data, tmp_path)


def _fed(reader: Reader, data: bytes, path: Path) -> None:
    try:
        reader.feed(data, path)
    except reader.raises:
        pass
    except SgpuError as error:
        raise AssertionError(f"{error!r} is not what it documents") from error


def test_the_introduction_of_an_agent_that_is_not_understood_is_that_of_another_version():
    ready = msgspec.msgpack.encode({"type": "agent-ready", "pid": 7, "protocol_version": 5, "inventory": "changed"})
    read = codec.from_agent.decode(ready)
    assert isinstance(read, AgentReady)
    assert (read.pid, read.protocol_version, read.runs) == (7, 0, ())
