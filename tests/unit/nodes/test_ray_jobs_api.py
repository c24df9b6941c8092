"""A pool as a Ray job: requests to Ray's Jobs API, where the token is found, and the errors on failure."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from free_ports import free_ports
from ray_jobs_api import RayJobsApi, archive_once, listening_line

from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.nodes.ray import deploy as deploying
from sgpu_magic.nodes.ray.deploy import Deployment, JobsApi, deploy, undeploy

TOKEN = "7f" * 32
KEY = "k" * 40
TEAM = Deployment("team", "tcp://0.0.0.0:8700", (("ann", "a" * 40, True),))
NOWHERE = {"HOME": "/nowhere"}


@pytest.fixture
def head() -> Iterator[RayJobsApi]:
    made = RayJobsApi()
    yield made
    made.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[RayJobsApi]:
    """A head that requires a token."""
    made = RayJobsApi(TOKEN)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploying, "package_archive", archive_once)


# ---------------------------------------------------------------- the token


def test_a_wrong_or_missing_token_is_reported_with_the_places_to_set_it(guarded: RayJobsApi):
    with pytest.raises(PoolError, match=r"rejected the token that is set here \(RAY_AUTH_TOKEN, "):
        JobsApi(guarded.url, {"RAY_AUTH_TOKEN": "0" * 64}).check()
    with pytest.raises(PoolError, match=r"requires its token.*Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, or write"):
        JobsApi(guarded.url, NOWHERE).check()
    with pytest.raises(PoolError, match="requires its token"):
        JobsApi(guarded.url, {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "Disabled"}).check()


def test_the_token_is_found_where_ray_finds_it(guarded: RayJobsApi, tmp_path: Path):
    JobsApi(guarded.url, {"RAY_AUTH_TOKEN": f" {TOKEN}\n"}).check()
    named, home = tmp_path / "named", tmp_path / "home"
    named.write_text(f"{TOKEN}\n")
    JobsApi(guarded.url, {"RAY_AUTH_TOKEN_PATH": str(named)}).check()
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(TOKEN)
    JobsApi(guarded.url, {"HOME": str(home)}).check()
    # the variable has priority over the files
    with pytest.raises(PoolError, match="rejected the token"):
        JobsApi(guarded.url, {"RAY_AUTH_TOKEN": "other", "RAY_AUTH_TOKEN_PATH": str(named), "HOME": str(home)}).check()


def test_headers_for_a_proxy_are_sent_and_their_authorization_wins(guarded: RayJobsApi):
    headers = {"authorization": f"Bearer {TOKEN}", "X-Proxy": "gate"}
    JobsApi(guarded.url, {"RAY_JOB_HEADERS": json.dumps(headers), "RAY_AUTH_TOKEN": "other"}).check()
    assert guarded.headers["x-proxy"] == "gate"
    assert guarded.headers["authorization"] == f"Bearer {TOKEN}"


def test_a_token_or_headers_that_can_not_be_read_are_told_before_any_request(guarded: RayJobsApi, tmp_path: Path):
    asked = len(guarded.asked)
    missing = tmp_path / "missing"
    with pytest.raises(UsageError, match=f"RAY_AUTH_TOKEN_PATH names {missing}, and there is no such file"):
        JobsApi(guarded.url, {"RAY_AUTH_TOKEN_PATH": str(missing)})
    with pytest.raises(UsageError, match=f"token can't be read from {tmp_path}"):
        JobsApi(guarded.url, {"RAY_AUTH_TOKEN_PATH": str(tmp_path)})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="token can't be read from"):
        JobsApi(guarded.url, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "binary")})
    for headers in ("[1]", '{"a": 1}', "a: b"):
        with pytest.raises(UsageError, match="RAY_JOB_HEADERS is not a JSON object of strings"):
            JobsApi(guarded.url, NOWHERE | {"RAY_JOB_HEADERS": headers})
    for text in ("two\nlines", "Schlüssel€"):
        with pytest.raises(UsageError, match="has line breaks or characters outside ASCII"):
            JobsApi(guarded.url, {"RAY_AUTH_TOKEN": text})
    assert len(guarded.asked) == asked


# ---------------------------------------------------------------- the address


@pytest.mark.parametrize("address", ["head:8265", "tcp://head:6379", "http://", "", "http://[::1", "http://head:port"])
def test_what_is_not_the_address_of_a_dashboard_is_refused(address: str):
    with pytest.raises(UsageError, match="--ray takes the address of Ray's dashboard, http://HEAD:8265, not"):
        JobsApi(address, NOWHERE)


def test_a_dashboard_that_is_not_there(head: RayJobsApi):
    (port,) = free_ports(1)
    with pytest.raises(PoolError, match=r"can't be reached: .*refused.*ray start --head --dashboard-host"):
        JobsApi(f"http://127.0.0.1:{port}", NOWHERE).check()
    # the port serves HTTP without TLS
    with pytest.raises(PoolError, match="can't be reached"):
        JobsApi(head.url.replace("http:", "https:"), NOWHERE).check()


def test_certificates_that_can_not_be_read(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("no certificate")
    for variables in (
        {"RAY_TLS_CA_CERT": str(tmp_path / "missing.pem")},
        {"RAY_TLS_CA_CERT": str(tmp_path / "ca.pem")},
        {"RAY_TLS_SERVER_CERT": str(tmp_path / "ca.pem"), "RAY_TLS_SERVER_KEY": str(tmp_path / "missing.pem")},
    ):
        with pytest.raises(UsageError, match="RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT or RAY_TLS_SERVER_KEY names can't"):
            JobsApi("https://head:8265", NOWHERE | variables)


def test_another_server_at_this_address_is_told(head: RayJobsApi):
    head.jobs["page"] = {"html": "no job of Ray's"}
    with pytest.raises(PoolError, match=r"does not answer like Ray's dashboard. Is the address right\?"):
        JobsApi(head.url, NOWHERE).jobs()


# ---------------------------------------------------------------- deploying


def test_a_pool_is_deployed_as_a_job(head: RayJobsApi):
    head.prints = [None, "starting\n", f"starting\n{listening_line('team', 'tcp://0.0.0.0:8700', KEY)}"]
    options = {
        "entrypoint_num_cpus": 0.5,
        "runtime_env": {"pip": ["ray"], "py_modules": ["mine"], "env_vars": {"HF_HOME": "/hf", "SGPU_PRICES": "a10=2"}},
        "metadata": {"team": "vision"},
    }
    reached = deploy(JobsApi(f"{head.url}/", NOWHERE), TEAM, {"SGPU_PRICES": "a10=1", "SGPU_USER_GPUS": "4"}, options)
    # the wildcard is replaced by the head's name
    assert reached == ("tcp://127.0.0.1:8700", KEY)
    ((package, data),) = head.packages.items()
    assert package.startswith("_ray_pkg_")
    assert package.endswith(".zip")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {"sgpu_magic/__init__.py", "sgpu_magic/cli/serving.py"} <= set(archive.namelist())
    (asked,) = head.submitted
    environment = asked["runtime_env"]
    assert asked["entrypoint"] == "exec python -m sgpu_magic.cli.ray_deployment"
    assert asked["entrypoint_num_cpus"] == 0.5
    assert asked["submission_id"].startswith("sgpu-team-")
    assert asked["metadata"] == {"team": "vision", "sgpu-pool": "team"}
    assert environment["pip"] == ["ray"]
    assert environment["py_modules"] == [f"gcs://{package}", "mine"]
    variables = environment["env_vars"]
    deployed = variables.pop("SGPU_DEPLOYED")
    assert msgspec.json.decode(deployed, type=Deployment) == TEAM
    # options given for the job have priority over this shell's variables
    assert variables == {
        "RAY_JOB_STOP_WAIT_TIME_S": "60", "HF_HOME": "/hf", "SGPU_PRICES": "a10=2", "SGPU_USER_GPUS": "4",
    }  # fmt: skip


def test_the_package_is_uploaded_once(head: RayJobsApi):
    head.prints = [listening_line("team", "tcp://10.0.0.7:9000", KEY)]
    assert deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {})[0] == "tcp://10.0.0.7:9000"
    deploy(JobsApi(head.url, NOWHERE), msgspec.structs.replace(TEAM, name="other"), {}, {})
    assert [method for method, path in head.asked if "packages" in path] == ["GET", "PUT", "GET"]
    assert len(head.submitted) == 2


def test_a_pool_of_this_name_that_runs_already_is_named(head: RayJobsApi):
    head.add_job("sgpu-team-old", "FAILED", "team")
    head.add_job("sgpu-other-1", "RUNNING", "other")
    head.add_job("nightly", "RUNNING", None)
    head.add_job("sgpu-team-1", "PENDING", "team")
    with pytest.raises(PoolError, match=r"already running .*\(job sgpu-team-1\)") as caught:
        deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {})
    assert f"`sgpu pool undeploy --ray {head.url} --name team` ends it" in caught.value.message
    assert (head.packages, head.submitted) == ({}, [])


@pytest.mark.parametrize(
    ("prints", "message", "reported"),
    [
        ("".join(f"line {n}\n" for n in range(9)), "", "line 4\nline 5\nline 6\nline 7\nline 8"),
        (None, "Runtime environment setup failed", "Runtime environment setup failed"),
    ],
)
def test_a_pool_that_does_not_start_is_reported_with_its_last_lines(
    head: RayJobsApi, prints: str | None, message: str, reported: str
):
    head.prints, head.becomes = [prints], ("FAILED", message)
    with pytest.raises(PoolError, match="the pool did not start on the Ray cluster") as caught:
        deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {})
    assert caught.value.message.endswith(f"): {reported}")


def test_a_pool_that_never_listens_is_ended(head: RayJobsApi):
    head.prints = ["waiting for the cluster\n"]
    with pytest.raises(PoolError, match=r"did not listen within .*was ended: waiting for the cluster"):
        deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {}, start_timeout_s=0.0)
    assert [job["status"] for job in head.jobs.values()] == ["STOPPED"]


def test_a_new_cluster_that_accepts_no_job_yet_is_asked_again(head: RayJobsApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deploying, "_AGAIN_S", 0.01)
    head.prints = [listening_line("team", "tcp://0.0.0.0:8700", KEY)]
    head.refusals = [(500, "Traceback\nException: No available agent to submit job, please try again later.")] * 2
    deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {})
    assert len(head.submitted) == 1


def test_a_refusal_is_reported_with_its_last_line(head: RayJobsApi):
    head.refusals = [(400, "Traceback (most recent call last):\n  File x\nValueError: entrypoint_num_gpus must be > 0"),
                     (500, "")]  # fmt: skip
    with pytest.raises(PoolError, match=r"refused the request \(HTTP 400\): ValueError: entrypoint_num_gpus must"):
        deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {})
    with pytest.raises(PoolError, match=r"\(HTTP 500\): no message"):
        deploy(JobsApi(head.url, NOWHERE), TEAM, {}, {})


# ---------------------------------------------------------------- ending it


def test_undeploy_ends_the_pool_of_that_name_only(head: RayJobsApi):
    for name, pool in (("sgpu-team-1", "team"), ("sgpu-other-1", "other"), ("nightly", None)):
        head.add_job(name, "RUNNING", pool)
    api = JobsApi(head.url, NOWHERE)
    assert undeploy(api, "team") == f"the pool team on {head.url} has ended"
    assert {name: job["status"] for name, job in head.jobs.items()} == {
        "sgpu-team-1": "STOPPED", "sgpu-other-1": "RUNNING", "nightly": "RUNNING",
    }  # fmt: skip
    with pytest.raises(PoolError, match="no pool named team was deployed on the Ray cluster"):
        undeploy(api, "team")


def test_a_pool_that_does_not_end_is_told(head: RayJobsApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deploying, "_STOP_WAIT_S", -10)
    head.stops = False
    head.add_job("sgpu-team-1", "RUNNING", "team")
    with pytest.raises(PoolError, match="team was asked to end and is still running"):
        undeploy(JobsApi(head.url, NOWHERE), "team")
