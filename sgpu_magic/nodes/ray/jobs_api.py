"""Ray's Jobs API over HTTP, for machines without Ray; token and certificates are looked up as Ray does."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from sgpu_magic.errors import PoolError, UsageError

# a reachable head node answers in milliseconds
_FIRST_S = 5.0
_ANSWER_S = 60.0
_AGAIN_S = 1.0
_NOT_YET = "No available agent"
_HEADERS = dict[str, str]
T = TypeVar("T")


class Job(msgspec.Struct, frozen=True):
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
    def is_over(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class _Logs(msgspec.Struct, frozen=True):
    logs: str = ""


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
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--ray takes the address of Ray's dashboard, http://HEAD:8265, not {address[:80]!r}.")
        self.address = address.rstrip("/")
        self.host = parts.hostname
        self._headers = _headers(environ)
        handlers: list[urllib.request.BaseHandler] = []
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_tls(environ)))
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
        deadline = time.monotonic() + _ANSWER_S
        while True:
            try:
                self._ask("POST", "/api/jobs/", json.dumps(request).encode())
                return
            except PoolError as error:
                if _NOT_YET not in error.message or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)

    def jobs(self) -> list[Job]:
        return self._decoded(self._ask("GET", "/api/jobs/"), list[Job])

    def job(self, name: str) -> Job:
        return self._decoded(self._ask("GET", f"/api/jobs/{name}"), Job)

    def logs(self, name: str) -> str:
        """The job's output; "" while there is none."""
        found = self._ask("GET", f"/api/jobs/{name}/logs", missing=True)
        return "" if found is None else self._decoded(found, _Logs).logs

    def stop(self, name: str) -> None:
        self._ask("POST", f"/api/jobs/{name}/stop")

    # ------------------------------------------------------------ within

    def _decoded(self, data: bytes | None, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data or b"", type=kind)
        except msgspec.DecodeError:
            raise PoolError(f"{self.address} does not answer like Ray's dashboard. Is the address right?") from None

    def _ask(
        self, method: str, path: str, data: bytes | None = None, *, missing: bool = False, timeout_s: float = _ANSWER_S
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
                said = error.read(2000).decode(errors="replace").strip()
            raise self._refused(error.code, said) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", "") or error
            raise PoolError(
                f"Ray's dashboard at {self.address} can't be reached: {reason}. Is the head node up, is the dashboard "
                "running (`ray start --head --dashboard-host 0.0.0.0`), and can this machine reach its port?"
            ) from None

    def _refused(self, status: int, said: str) -> PoolError:
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
        words = said.splitlines()[-1] if said else "no message"
        return PoolError(f"Ray's dashboard at {self.address} refused the request (HTTP {status}): {words[:500]}")


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        headers = msgspec.json.decode(environ.get("RAY_JOB_HEADERS") or "{}", type=_HEADERS)
    except msgspec.DecodeError:
        raise UsageError("the variable RAY_JOB_HEADERS is not a JSON object of strings.") from None
    token = _token(environ)
    if token and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {token}"
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
