"""MLflow servers for tests: the real one, its REST application alone, and a misbehaving gateway before either.

`RestServer` is MLflow's server application with MLflow's database store, served by werkzeug: `mlflow server` without
its pages and its job runner. `full_server_python` installs the complete package `mlflow`.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

from free_ports import free_port
from mlflow_stores import copy_store
from waiting import eventually

_SERVE = """
import os, sys
from mlflow.server import app, handlers
from werkzeug.serving import make_server
handlers.initialize_backend_stores(sys.argv[1], sys.argv[1], sys.argv[2])
server = make_server("127.0.0.1", int(sys.argv[3]), app, threaded=True)
print("serving", flush=True)
server.serve_forever()
"""
START_S = 60.0


class RestServer:
    """A server on its own port that can be killed and started again on the same data.

    Args:
        folder: The folder of its database and artifacts.
        empty_store: An empty database that it starts with, since making one takes seconds.
        python: An interpreter with the complete `mlflow`; "" serves the REST application with this interpreter.
    """

    def __init__(self, folder: Path, empty_store: Path, python: str = "") -> None:
        self._folder = folder
        copy_store(empty_store, folder / "server.db", "mlflow-artifacts:")
        self._python = python
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def database(self) -> str:
        return f"sqlite:///{self._folder / 'server.db'}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        artifacts = self._folder / "served-artifacts"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "SGPU_"))} | {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "_MLFLOW_SERVER_FILE_STORE": self.database,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": artifacts.as_uri(),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        }
        if self._python:
            options = [
                *("--backend-store-uri", self.database, "--artifacts-destination", str(artifacts)),
                *("--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"),
            ]
            command = [self._python, "-m", "mlflow", "server", *options]
        else:
            command = [sys.executable, "-c", _SERVE, self.database, "mlflow-artifacts:/", str(self.port)]
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        eventually(self._answers, START_S, lambda: (self._folder / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        """Send SIGKILL to the server and all its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        self.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False


class Gateway:
    """Forwards requests to a server, as a proxy or an authentication gateway does, and misbehaves on request.

    Args:
        port: The server's port.

    Attributes:
        delay_s: Delay in seconds before it forwards a request.
        answers_after: Delay in seconds before it returns the response to a forwarded request.
        status: Status that it responds with itself; 0 forwards the request.
        authorization: The required value of the Authorization header; "" for none.
        seen: (method and path, Authorization header) of every request.
    """

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.answers_after = 0.0
        self.status = 0
        self.authorization = ""
        self.seen: list[tuple[str, str]] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                gateway.handle(self, port)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.uri = f"http://127.0.0.1:{self._server.server_port}"

    def handle(self, request: BaseHTTPRequestHandler, port: int) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        given = request.headers.get("Authorization", "")
        self.seen.append((f"{request.command} {request.path}", given))
        self._closing.wait(self.delay_s)
        status = self.status or (401 if self.authorization and given != self.authorization else 0)
        try:
            if status:
                self._answer(request, status, b"no")
                return
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
                connection.request(request.command, request.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
            self._closing.wait(self.answers_after)
            self._answer(request, answer.status, data, answer.headers.get("Content-Type", ""))
        except OSError:
            # the server is gone, or the client has given up
            request.close_connection = True

    @staticmethod
    def _answer(request: BaseHTTPRequestHandler, status: int, data: bytes, kind: str = "text/plain") -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def full_server_python(folder: Path) -> str:
    """Install the complete `mlflow`, in this environment's version, into a new environment; return its interpreter."""
    environ = dict(os.environ)
    index = environ.get("PIP_INDEX_URL", "")
    if index and "UV_DEFAULT_INDEX" not in environ and "UV_INDEX_URL" not in environ:
        environ["UV_DEFAULT_INDEX"] = index
    python = folder / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True, env=environ)
    wanted = f"mlflow=={version('mlflow-skinny')}"
    subprocess.run([*uv, "pip", "install", "-q", "--python", str(python), wanted], check=True, env=environ)
    return str(python)
