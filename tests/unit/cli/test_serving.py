"""`sgpu pool deploy` and `undeploy` as commands, the options of the job, and the entry point of the job."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from ray_jobs_api import RayJobsApi, archive_once, listening_line

from sgpu_magic.cli import main as cli
from sgpu_magic.cli import ray_deployment
from sgpu_magic.cli.ray_deployment import job_options
from sgpu_magic.errors import UsageError
from sgpu_magic.nodes.ray import deploy as deploying
from sgpu_magic.nodes.ray.deploy import DEPLOYED, Deployment
from sgpu_magic.pool.clients import AuthorizedClient, authorize, read_clients
from sgpu_magic.system.secure_sockets import new_key_pair, read_key_pair

ANN, BEN = (new_key_pair().public for _ in range(2))
KEY = "k" * 40


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayJobsApi]:
    monkeypatch.setattr(deploying, "package_archive", archive_once)
    made = RayJobsApi()
    made.prints = [listening_line("vision", "tcp://0.0.0.0:9100", KEY)]
    yield made
    made.close()


def deployed(head: RayJobsApi) -> tuple[Deployment, dict[str, str]]:
    """The pool and the other variables of the only submitted job."""
    (asked,) = head.submitted
    variables = dict(asked["runtime_env"]["env_vars"])
    return msgspec.json.decode(variables.pop(DEPLOYED), type=Deployment), variables


def test_deploy_gives_the_command_that_adds_the_pool(
    own_places: Path, head: RayJobsApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["pool", "keygen"]) == 0
    own = read_key_pair(own_places / "own" / "client.key").public
    assert cli.main(["pool", "authorize", "ann", ANN, "--admin", "--name", "vision"]) == 0
    monkeypatch.setenv("SGPU_PRICES", "a10=1")
    monkeypatch.setenv("SGPU_RAY_SAME_FILES", "1")
    monkeypatch.setenv("SGPU_SIMULATE", "a10:2")
    capsys.readouterr()
    arguments = ["--ray", head.url, "--name", "vision"]
    job = ["--", "--runtime-env-json", '{"pip": ["msgspec"]}', "--entrypoint-num-cpus=0.5"]
    assert cli.main(["pool", "deploy", *arguments, "--listen", "tcp://0.0.0.0:9100", *job]) == 0
    out = capsys.readouterr().out
    assert f"sgpu pool add vision tcp://127.0.0.1:9100 --key '{KEY}'" in out
    me = getpass.getuser()
    assert f"pool vision · tcp://127.0.0.1:9100 · authorized users: {', '.join(sorted(('ann', me)))}\n" in out
    assert "every user of this pool can read and change the files and memory of others' runs" in out
    what, variables = deployed(head)
    assert what == Deployment("vision", "tcp://0.0.0.0:9100", ((me, own, True), ("ann", ANN, True)))
    # the pool's settings are passed on; this machine's settings and directories are not
    ours = {name: value for name, value in variables.items() if name.startswith("SGPU_")}
    assert ours == {"SGPU_PRICES": "a10=1", "SGPU_RAY_SAME_FILES": "1"}
    assert head.submitted[0]["runtime_env"]["pip"] == ["msgspec"]
    assert head.submitted[0]["entrypoint_num_cpus"] == 0.5

    assert cli.main(["pool", "deploy", *arguments]) == 1
    assert "a pool named vision is already running" in capsys.readouterr().err
    assert cli.main(["pool", "undeploy", *arguments]) == 0
    assert capsys.readouterr().out == f"the pool vision on {head.url} has ended\n"
    assert cli.main(["pool", "undeploy", *arguments]) == 1
    assert "no pool named vision was deployed" in capsys.readouterr().err


def test_deploy_authorizes_nobody_twice(
    own_places: Path, head: RayJobsApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    clients = own_places / "state" / "pools" / "vision" / "clients.toml"
    arguments = ["pool", "deploy", "--ray", head.url, "--name", "vision"]
    assert cli.main(arguments) == 0
    assert "no user is authorized yet: use `sgpu pool authorize`" in capsys.readouterr().out
    assert deployed(head)[0].clients == ()
    cli.main(["pool", "undeploy", *arguments[2:]])
    head.submitted.clear()
    # this user's own key is on the list, without admin rights
    assert cli.main(["pool", "keygen"]) == 0
    own = read_key_pair(own_places / "own" / "client.key").public
    authorize(clients, "me", own, admin=False)
    assert cli.main(arguments) == 0
    assert deployed(head)[0].clients == (("me", own, False),)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ray", "head:8265"], "--ray takes the address of Ray's dashboard"),
        (["--ray", "http://head:8265", "--name", "../x"], "is not a pool name"),
        (["--ray", "http://head:8265", "--listen", "head:1"], "--listen takes tcp://"),
    ],
)
def test_deploy_says_what_means_nothing(
    own_places: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
):
    assert cli.main(["pool", "deploy", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_options_of_the_job():
    words = ["--runtime-env-json", '{"pip": ["msgspec"]}', "--entrypoint-num-cpus=0.5", "--metadata-json", '{"a": "b"}']
    assert job_options(words) == {
        "runtime_env": {"pip": ["msgspec"]}, "entrypoint_num_cpus": 0.5, "metadata": {"a": "b"},
    }  # fmt: skip
    resources = ["--entrypoint-resources", '{"head": 0.1}', "--entrypoint-memory", "1000"]
    assert job_options(resources) == {"entrypoint_resources": {"head": 0.1}, "entrypoint_memory": 1000}
    assert job_options([]) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nothing", "1"], "'--nothing' is not an option of the job"),
        (["--runtime-env-json"], "'--runtime-env-json' is not an option of the job"),
        (["--entrypoint-num-cpus", "{}"], "--entrypoint-num-cpus takes JSON, not '{}'"),
        (["--entrypoint-num-cpus", "true"], "--entrypoint-num-cpus takes JSON, not 'true'"),
        (["--runtime-env-json", "pip: x"], "--runtime-env-json takes JSON, not 'pip: x'"),
        (["--metadata-json", "[]"], r"--metadata-json takes JSON, not '\[\]'"),
    ],
)
def test_options_of_the_job_that_mean_nothing(words: list[str], says: str):
    with pytest.raises(UsageError, match=says):
        job_options(words)


# ---------------------------------------------------------------- the job itself


def test_the_job_admits_the_deployments_users_and_keeps_those_that_it_has(
    own_places: Path, monkeypatch: pytest.MonkeyPatch
):
    clients = own_places / "state" / "pools" / "team" / "clients.toml"
    authorize(clients, "ben", BEN, admin=True)
    # the invalid address is rejected afterwards, so no service starts
    what = Deployment("team", "nowhere", (("ann", ANN, True), ("another name", BEN, False)))
    monkeypatch.setenv(DEPLOYED, msgspec.json.encode(what).decode())
    with pytest.raises(SystemExit, match=r"^sgpu: --listen takes tcp://"):
        ray_deployment.main()
    assert read_clients(clients) == {ANN: AuthorizedClient("ann", admin=True), BEN: AuthorizedClient("ben", admin=True)}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "entry point of `sgpu pool deploy`.* SGPU_DEPLOYED"),
        ("team", "entry point of `sgpu pool deploy`.* SGPU_DEPLOYED"),
        ('{"name": "../../x", "listen": "tcp://0.0.0.0:8700"}', "is not a pool name"),
    ],
)
def test_a_job_without_a_usable_deployment_says_so(
    own_places: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, says: str
):
    monkeypatch.delenv(DEPLOYED, raising=False)
    if value is not None:
        monkeypatch.setenv(DEPLOYED, value)
    with pytest.raises(SystemExit, match=f"^sgpu: .*{says}"):
        ray_deployment.main()
    assert list(own_places.iterdir()) == []


def test_a_runtime_directory_that_is_too_long_for_sockets_is_told(
    own_places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SGPU_RUNTIME_DIR", f"{own_places}/{'long' * 30}")
    assert cli.main(["pool", "serve", "--listen", "tcp://127.0.0.1:*"]) == 1
    err = capsys.readouterr().err
    assert "the pool team can't be served: paths of sockets in" in err
    assert "Set SGPU_RUNTIME_DIR to a shorter directory" in err
