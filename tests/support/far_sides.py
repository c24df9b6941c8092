"""A process that unpacks what this one has packed, and a notebook's namespace to pack from."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec

from sgpu_magic.payload import buffers
from sgpu_magic.payload.pack import Packed, pack_namespace
from sgpu_magic.payload.unpack import unpack
from sgpu_magic.wire.attachments import PackedLayout

KEY = b"k" * 32

# A rank stand-in: forks per request, with a namespace of its own; replies with the value of `answer`.
FAR_SIDE = """
import json, os, sys, traceback, types
import msgspec
from sgpu_magic.payload import unpack, pack
from sgpu_magic.wire.run import PackedLayout
KEY = b"k" * 32
decode = msgspec.msgpack.Decoder(PackedLayout).decode
def serve(request):
    sys.path[:0] = [request["path"]] if request["path"] else []
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    namespace = main.__dict__
    namespace["__builtins__"] = __import__("builtins")
    try:
        if request["fd"]:
            with open(request["data"], "r+b") as file:
                data = unpack.map_private(file.fileno(), os.fstat(file.fileno()).st_size)
        else:
            data = open(request["data"], "rb").read()
        layout = decode(open(request["layout"], "rb").read())
        unpack.unpack_namespace(data, layout, KEY, namespace)
        exec(compile(request["code"], "<far>", "exec"), namespace)
        answer = {"answer": namespace.get("answer")}
        if request["back"]:
            packed = pack.pack_object(namespace["back"], namespace, KEY)
            with open(request["data"] + ".back", "wb") as file:
                file.write(packed.to_bytes())
            with open(request["layout"] + ".back", "wb") as file:
                file.write(msgspec.msgpack.encode(packed.layout))
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        serve(json.loads(line))
        os._exit(0)
    os.waitpid(pid, 0)
"""


class FarSide:
    """A process that unpacks what this one has packed, and runs code with it."""

    def __init__(self, folder: Path) -> None:
        script = folder / "far_side.py"
        script.write_text("import torch\n" + FAR_SIDE)
        environ = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def run(self, packed: Packed, code: str, *, mapped: bool = True, back: bool = False, path: str = "") -> Any:
        data, layout = self._folder / "data", self._folder / "layout"
        buffers.write_file(packed, data)
        layout.write_bytes(msgspec.msgpack.encode(packed.layout))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "data": str(data),
            "layout": str(layout),
            "code": dedent(code),
            "fd": mapped,
            "back": back,
            "path": path,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        assert "error" not in reply, reply["error"]
        return reply["answer"]

    def back(self, namespace: dict[str, object]) -> Any:
        """Return the value of `back` after the last run, unpacked here."""
        layout = msgspec.msgpack.decode((self._folder / "layout.back").read_bytes(), type=PackedLayout)
        return unpack((self._folder / "data.back").read_bytes(), layout, KEY, namespace)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


class Notebook:
    """A `__main__` whose cells are run and whose names are packed."""

    def __init__(self, namespace: dict[str, object]) -> None:
        self.namespace = namespace
        self._cells = 0

    def cell(self, source: str) -> None:
        self._cells += 1
        source, file = dedent(source), f"<cell-{self._cells}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), self.namespace)

    def pack(self, *names: str, exclude: frozenset[str] = frozenset(), **options: Any) -> Packed:
        values = {name: self.namespace[name] for name in names}
        return pack_namespace(values, self.namespace, KEY, exclude=exclude, **options)
