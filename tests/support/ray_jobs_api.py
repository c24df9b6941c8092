"""An HTTP server that answers as Ray's dashboard does to the requests of its Jobs API, with token authentication.

Source: Ray's `dashboard/modules/job/job_head.py` and `dashboard/modules/job/common.py`.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sgpu_magic.nodes.ray.driver import package_archive

# compressing the package takes a tenth of a second, and it is the same for all tests
archive_once = functools.cache(package_archive)
_JOB = re.compile(r"/api/jobs/(?P<job>[^/]+)(?P<what>/logs|/stop)?")


def listening_line(name: str, address: str, key: str) -> str:
    """Return the line that a deployed pool prints once clients can connect."""
    reached = address.replace("0.0.0.0", "head-7")
    return (
        f"pool {name} · engine ray · {address} · 8701 for variables and files · add it with: "
        f"sgpu pool add {name} {reached} --key '{key}'\n"
    )


class RayJobsApi:
    """A head node without a cluster: it stores packages and jobs, and the test controls what jobs do.

    Args:
        token: What clients must send; "" for a cluster without authentication.

    Attributes:
        url: The address of the dashboard.
        asked: Method and path of each request, in order.
        headers: Headers of the last request, with names in lower case.
        packages: Uploaded packages by name.
        jobs: Ray's description of each job, by submission id.
        submitted: The bodies of requests for a job.
        refusals: Status and text of the answers to the next requests for a job; then they are accepted.
        prints: What new jobs have printed at each request for their logs; the last one stays. None is a job without
            a log yet.
        becomes: Status of a new job, and message.
        stops: Whether jobs end when they are stopped.
    """

    def __init__(self, token: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self.headers: dict[str, str] = {}
        self.packages: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: list[dict[str, Any]] = []
        self.refusals: list[tuple[int, str]] = []
        self.prints: list[str | None] = [""]
        self.becomes = ("RUNNING", "")
        self.stops = True
        api = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                api.asked.append((self.command, self.path))
                api.headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                sent = self.headers.get("Authorization", "")
                if token and not sent:
                    status, data = 401, b"Unauthorized: Missing authentication token"
                elif token and sent != f"Bearer {token}":
                    status, data = 403, b"Forbidden: Invalid authentication token"
                else:
                    status, data = api._answer(self.command, self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = _do

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def add_job(self, name: str, status: str, pool: str | None) -> None:
        """Add a job as Ray lists it; `pool` is the name of the pool that it runs, None for another job."""
        metadata = None if pool is None else {"sgpu-pool": pool}
        self.jobs[name] = {"type": "SUBMISSION", "submission_id": name, "status": status, "metadata": metadata}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/api/version":
            return 200, b'{"version": "4", "ray_version": "2.55.1"}'
        if path.startswith("/api/packages/gcs/"):
            name = path.rpartition("/")[2]
            if method == "PUT":
                self.packages[name] = body
            return (200, b"") if name in self.packages else (404, b"Package does not exist")
        if path == "/api/jobs/" and method == "GET":
            return 200, json.dumps(list(self.jobs.values())).encode()
        if path == "/api/jobs/":
            if self.refusals:
                status, text = self.refusals.pop(0)
                return status, text.encode()
            asked = json.loads(body)
            self.submitted.append(asked)
            name = asked["submission_id"]
            self.add_job(name, self.becomes[0], asked["metadata"]["sgpu-pool"])
            self.jobs[name]["message"] = self.becomes[1]
            return 200, json.dumps({"job_id": name, "submission_id": name}).encode()
        match = _JOB.fullmatch(path)
        if match is None or match["job"] not in self.jobs:
            return 404, b"Job does not exist"
        job = self.jobs[match["job"]]
        if match["what"] == "/stop":
            if self.stops:
                job["status"] = "STOPPED"
            return 200, b'{"stopped": true}'
        if match["what"] is None:
            return 200, json.dumps(job).encode()
        output = self.prints.pop(0) if len(self.prints) > 1 else self.prints[0]
        return (404, b"No logs") if output is None else (200, json.dumps({"logs": output}).encode())
