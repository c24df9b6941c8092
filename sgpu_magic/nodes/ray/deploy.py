"""A pool service as a job on a Ray cluster, over Ray's Jobs API, for machines without Ray.

Token and certificates are looked up as Ray does.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import secrets
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.nodes.ray.driver import package_archive
from sgpu_magic.system.secure_sockets import reached_at
from sgpu_magic.wire.decoding import decode_json

DEPLOYED = "SGPU_DEPLOYED"
"""The environment variable of the job that holds its `Deployment`, as JSON."""

POOL = "sgpu-pool"
# Ray's default of 3 s between stopping and killing a job is too short: a pool ends its agents and ranks first
_STOP_WAIT_S = 60
_POLL_S = 0.25
_START_S = 180.0
_WORDS = re.compile(r"pool \S+ · engine ray · (?P<address>tcp://\S+) · .*--key '(?P<key>[^']{40})'")
# a reachable head node answers in milliseconds
_FIRST_S = 5.0
_ANSWER_TIMEOUT_S = 60.0
_AGAIN_S = 1.0
# what Ray's dashboard answers, with status 500, before its agents have started
_NO_AGENT = "No available agent"
_HEADERS = dict[str, str]
T = TypeVar("T")


class NoAgentYet(PoolError):
    """Ray's dashboard has no agent yet that could start a job."""


class Deployment(msgspec.Struct, frozen=True):
    """The configuration of a deployed pool.

    Args:
        name: The pool's name.
        listen: The address at which it listens for clients.
        clients: The authorized clients: name, public key, whether they are an admin.
    """

    name: str
    listen: str
    clients: tuple[tuple[str, str, bool], ...] = ()


def deploy(
    api: JobsApi,
    what: Deployment,
    variables: Mapping[str, str],
    options: Mapping[str, object],
    *,
    start_timeout_s: float = _START_S,
) -> tuple[str, str]:
    """Start the pool in the cluster, and wait until clients can connect.

    Args:
        api: The cluster's Jobs API.
        what: The pool.
        variables: Its settings as environment variables, `SGPU_...`.
        options: Additional fields of Ray's request.
        start_timeout_s: Time within which the pool must listen.

    Returns:
        The address at which clients reach it, and its public key.

    Raises:
        PoolError: The cluster refuses, a pool of this name runs already, or the pool does not start.
    """
    api.check()
    if going := _going(api, what.name):
        raise PoolError(
            f"a pool named {what.name} is already running on the Ray cluster {api.address} (job "
            f"{going[0].submission_id}). `sgpu pool undeploy --ray {api.address} --name {what.name}` ends it; --name "
            "starts another one beside it."
        )
    archive = package_archive()
    package = api.upload(f"_ray_pkg_{hashlib.blake2b(archive, digest_size=16).hexdigest()}.zip", archive)
    job = f"sgpu-{what.name}-{secrets.token_hex(4)}"
    api.submit(_request(job, what, package, variables, options))
    listening = _await_listening(api, job, start_timeout_s)
    return reached_at(listening["address"], api.host), listening["key"]


def undeploy(api: JobsApi, name: str) -> str:
    """End the pool with its agents and runs in the cluster, and return a message for the user.

    Raises:
        PoolError: The cluster refuses, has no such pool, or the pool does not end.
    """
    api.check()
    going = _going(api, name)
    if not going:
        raise PoolError(f"no pool named {name} was deployed on the Ray cluster {api.address}, or it has ended.")
    for job in going:
        api.stop(job.submission_id or "")
    deadline = time.monotonic() + _STOP_WAIT_S + 10
    while _going(api, name):
        if time.monotonic() > deadline:
            raise PoolError(
                f"the pool {name} was asked to end and is still running. Ray's dashboard {api.address} has its log."
            )
        time.sleep(_POLL_S)
    return f"the pool {name} on {api.address} has ended"


def _request(
    job: str, what: Deployment, package: str, variables: Mapping[str, str], options: Mapping[str, object]
) -> dict[str, object]:
    environment = _table(options.get("runtime_env"))
    modules = environment.get("py_modules")
    return {
        **options,
        # `exec` replaces the shell, so that Ray's signals reach the pool
        "entrypoint": "exec python -m sgpu_magic.cli.ray_deployment",
        "submission_id": job,
        "runtime_env": {
            **environment,
            "py_modules": [package, *(cast("list[object]", modules) if isinstance(modules, list) else [])],
            "env_vars": {
                "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S),
                **variables,
                **_table(environment.get("env_vars")),
                DEPLOYED: msgspec.json.encode(what).decode(),
            },
        },
        "metadata": {**_table(options.get("metadata")), POOL: what.name},
    }


def _table(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _going(api: JobsApi, name: str) -> list[RayJob]:
    return [job for job in api.jobs() if not job.has_ended and (job.metadata or {}).get(POOL) == name]


def _await_listening(api: JobsApi, name: str, timeout_s: float) -> re.Match[str]:
    """Wait until the pool has printed that it listens."""
    deadline = time.monotonic() + timeout_s
    while True:
        if match := _WORDS.search(logs := api.logs(name)):
            return match
        job = api.job(name)
        last = "\n".join((api.logs(name) or logs).strip().splitlines()[-5:]) or (job.message or "")
        if job.has_ended:
            raise PoolError(f"the pool did not start on the Ray cluster {api.address} (job {name}): {last[-1500:]}")
        if time.monotonic() > deadline:
            api.stop(name)
            raise PoolError(
                f"the pool did not listen within {timeout_s:.0f} s on the Ray cluster {api.address}, so the job {name} "
                f"was ended: {last[-1500:]}"
            )
        time.sleep(_POLL_S)


# ---------------------------------------------------------------- Ray's Jobs API


class RayJob(msgspec.Struct, frozen=True):
    """Some fields of Ray's description of a job.

    Args:
        status: `PENDING`, `RUNNING`, `STOPPED`, `SUCCEEDED` or `FAILED`.
        submission_id: The job's name, None for drivers that were not submitted as jobs.
        message: Ray's message about the status.
        metadata: The metadata given at submission.
    """

    status: str
    submission_id: str | None = None
    message: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class JobsApi:
    """A client of one cluster. Every method may raise `PoolError`: the cluster can't be reached, or refuses.

    Args:
        address: The address of Ray's dashboard, `http://head:8265` or `https://...`.
        environ: The environment with Ray's variables; None for that of this process.

    Raises:
        UsageError: The address or one of the variables is invalid.
    """

    def __init__(self, address: str, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        scheme, self.host = _host_and_port(address)
        self.address = address.rstrip("/")
        self._headers = _headers(environ)
        handlers = [urllib.request.HTTPSHandler(context=_tls(environ))] if scheme == "https" else []
        self._opener = urllib.request.build_opener(*handlers)

    def check(self) -> None:
        """Make a small request that needs the token, so that a wrong token is reported at once."""
        self._ask("GET", "/api/version", timeout_s=_FIRST_S)

    def upload(self, name: str, data: bytes) -> str:
        """Upload a package to the cluster, unless it has it already, and return its URI."""
        path = f"/api/packages/gcs/{name}"
        if self._ask("GET", path, missing=True) is None:
            self._ask("PUT", path, data)
        return f"gcs://{name}"

    def submit(self, request: Mapping[str, object]) -> None:
        """Submit a job: the fields of Ray's `JobSubmitRequest`. Retries for 60 s while a new cluster accepts none."""
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while True:
            try:
                self._ask("POST", "/api/jobs/", json.dumps(request).encode())
                return
            except NoAgentYet:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)

    def jobs(self) -> list[RayJob]:
        return self._decoded(self._ask("GET", "/api/jobs/"), list[RayJob])

    def job(self, name: str) -> RayJob:
        return self._decoded(self._ask("GET", f"/api/jobs/{name}"), RayJob)

    def logs(self, name: str) -> str:
        """The job's output; "" while there is none."""
        found = self._ask("GET", f"/api/jobs/{name}/logs", missing=True)
        return "" if found is None else self._decoded(found, dict[str, str]).get("logs", "")

    def stop(self, name: str) -> None:
        self._ask("POST", f"/api/jobs/{name}/stop")

    # ------------------------------------------------------------ internals

    def _decoded(self, data: bytes | None, kind: type[T]) -> T:
        try:
            return decode_json(data or b"", type=kind)
        except msgspec.DecodeError:
            raise PoolError(f"{self.address} does not answer like Ray's dashboard. Is the address right?") from None

    def _ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        missing: bool = False,
        timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> bytes | None:
        request = urllib.request.Request(self.address + path, data, self._headers, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json" if method == "POST" else "application/octet-stream")
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if missing and error.code == http.HTTPStatus.NOT_FOUND:
                    return None
                text = error.read(2000).decode(errors="replace").strip()
            raise self._refused(error.code, text) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", "") or error
            raise PoolError(
                f"Ray's dashboard at {self.address} can't be reached: {reason}. Is the head node up, is the dashboard "
                "running (`ray start --head --dashboard-host 0.0.0.0`), and can this machine reach its port?"
            ) from None

    def _refused(self, status: int, text: str) -> PoolError:
        if status == http.HTTPStatus.UNAUTHORIZED:
            return PoolError(
                f"the Ray cluster at {self.address} requires its token, and none is set here. Set RAY_AUTH_TOKEN, or "
                "RAY_AUTH_TOKEN_PATH, or write it to ~/.ray/auth_token."
            )
        if status == http.HTTPStatus.FORBIDDEN:
            return PoolError(
                f"the Ray cluster at {self.address} rejected the token that is set here (RAY_AUTH_TOKEN, "
                "RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token, in this order): it is not the cluster's."
            )
        words = text.splitlines()[-1] if text else "no message"
        refused = NoAgentYet if _NO_AGENT in text else PoolError
        return refused(f"Ray's dashboard at {self.address} refused the request (HTTP {status}): {words[:500]}")


def _host_and_port(address: str) -> tuple[str, str]:
    """Return scheme and host of the dashboard's address."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(address)
        # an invalid port raises ValueError
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.scheme, parts.hostname
    raise UsageError(f"--ray takes the address of Ray's dashboard, http://HEAD:8265, not {address[:80]!r}.")


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        headers = decode_json(environ.get("RAY_JOB_HEADERS") or "{}", type=_HEADERS)
    except msgspec.DecodeError:
        raise UsageError("the variable RAY_JOB_HEADERS is not a JSON object of strings.") from None
    token = _token(environ)
    if token and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {token}"
    # http.client's own error would show the token
    if not all((name + value).isascii() and (name + value).isprintable() for name, value in headers.items()):
        raise UsageError("Ray's token or a header in RAY_JOB_HEADERS has line breaks or characters outside ASCII.")
    return headers


def _token(environ: Mapping[str, str]) -> str:
    if environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return ""
    if token := environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else Path(environ.get("HOME", "~")).expanduser() / ".ray" / "auth_token"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        if named:
            raise UsageError(f"RAY_AUTH_TOKEN_PATH names {named}, and there is no such file.") from None
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Ray's token can't be read from {path}: {error}.") from None


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    """A TLS context that verifies the head by the system's certificates and Ray's `RAY_TLS_CA_CERT`."""
    context = ssl.create_default_context()
    try:
        if authority := environ.get("RAY_TLS_CA_CERT"):
            context.load_verify_locations(authority)
        if certificate := environ.get("RAY_TLS_SERVER_CERT"):
            context.load_cert_chain(certificate, environ.get("RAY_TLS_SERVER_KEY"))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"a file that RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT or RAY_TLS_SERVER_KEY names can't be read: {error}."
        ) from None
    return context
