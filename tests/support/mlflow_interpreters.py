"""Interpreters with a small package `mlflow` that stands for the whole one: tests have mlflow-skinny, without pages."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = """\
import http.server, os, pathlib, sys

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "ui" and options["--host"] == "127.0.0.1"
if "broken" in options["--backend-store-uri"]:
    sys.exit("the store has another schema")
pathlib.Path(__file__).with_name(f"started-{os.getpid()}").write_text(options["--backend-store-uri"])


class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"OK")


http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Pages).serve_forever()
"""


class MlflowInterpreter:
    """An interpreter that has this environment's packages, and from `install` on a package `mlflow` with pages.

    Args:
        folder: Where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self._package = folder / "packages" / "mlflow"
        self.path = folder / "python"
        self.path.write_text(f'#!/bin/sh\nPYTHONPATH={self._package.parent} exec {sys.executable} "$@"\n')
        self.path.chmod(0o755)

    def install(self) -> None:
        """Install the package. Its `mlflow ui` refuses stores with `broken` in their URI."""
        pages = self._package / "server" / "js" / "build"
        pages.mkdir(parents=True)
        (pages / "index.html").touch()
        (self._package / "__init__.py").touch()
        (self._package / "__main__.py").write_text(_PACKAGE)

    def started(self) -> dict[int, str]:
        """Return the stores for which `mlflow ui` was started, by pid."""
        return {int(file.name.rpartition("-")[2]): file.read_text() for file in self._package.glob("started-*")}
