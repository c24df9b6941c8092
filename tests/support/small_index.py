"""A test's own package index: small wheels over HTTP, with answers that can be held back."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def small_wheel(name: str, version: str, *, needs: Iterable[str] = (), body: str = "", blob: int = 0) -> bytes:
    """Return a pure wheel with one module, which has `__version__`.

    Args:
        name: The name of distribution and module.
        version: Its version.
        needs: `Requires-Dist` lines.
        body: Further lines of the module.
        blob: Size in bytes of an incompressible file beside the module.
    """
    info = f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {line}\n" for line in needs)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n{body}\n".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if blob:
        files[f"{name}/blob.bin"] = hashlib.shake_128(name.encode()).digest(blob)
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()


def wheel_name(name: str, version: str) -> str:
    return f"{name}-{version}-py3-none-any.whl"


def write_wheel(folder: Path, name: str, version: str, **options: object) -> Path:
    """Write the wheel to a file."""
    path = folder / wheel_name(name, version)
    path.write_bytes(small_wheel(name, version, **options))  # type: ignore[arg-type]
    return path


class SmallIndex:
    """Serves wheels as in PEP 691, with their sizes.

    Attributes:
        asked: Requested paths.
        open: Set while answers are not held back; see `hold`.
        kept_waiting: Set once a request waits.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.kept_waiting = threading.Event()
        self._wheels: dict[str, dict[str, bytes]] = {}
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                if not index.open.is_set():
                    index.kept_waiting.set()
                index.open.wait(60)
                # the client may have been killed
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._answer()

            # uv uses HEAD to ask whether it may request ranges of a file
            do_HEAD = do_GET

            def _answer(self) -> None:
                kind, _, rest = self.path.strip("/").partition("/")
                if kind == "simple" and rest in index._wheels:
                    files = index._wheels[rest]
                    body = index._page(rest, files).encode()
                    self._send(body, "application/vnd.pypi.simple.v1+json")
                elif kind == "files" and (found := index._file(rest)) is not None:
                    self._send(found, "application/octet-stream")
                else:
                    self.send_error(404)

            def _send(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Hold back every answer until `open` is set again."""
        self.kept_waiting.clear()
        self.open.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def add(self, name: str, version: str, **options: object) -> None:
        """Publish a wheel; options as of `small_wheel`."""
        wheel = small_wheel(name, version, **options)  # type: ignore[arg-type]
        self._wheels.setdefault(name, {})[wheel_name(name, version)] = wheel

    def downloads(self) -> list[str]:
        """Return the file names of the downloaded wheels."""
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("/files/")]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _page(self, name: str, files: dict[str, bytes]) -> str:
        listed = [
            {
                "filename": file,
                "url": f"/files/{name}/{file}",
                "size": len(data),
                "hashes": {"sha256": hashlib.sha256(data).hexdigest()},
                "upload-time": "2026-01-01T00:00:00Z",
            }
            for file, data in files.items()
        ]
        return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": listed})

    def _file(self, rest: str) -> bytes | None:
        name, _, file = rest.partition("/")
        return self._wheels.get(name, {}).get(file)
