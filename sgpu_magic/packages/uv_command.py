"""Running uv: where it is, and what it says when it fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.system import processes

# a paragraph, not a page: of a resolver's proof the beginning says what is wrong
_MOST_CHARACTERS = 1200
_KEPT_LINES = 200
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class UvFailed(Exception):
    """uv ended with an error.

    Args:
        words: What it said last, as one paragraph without credentials.
        text: All that it said.
    """

    def __init__(self, words: str, text: str) -> None:
        super().__init__(words)
        self.words = words
        self.text = text


def uv_path() -> str:
    """uv's executable: the one that came with sgpu-magic, else the one on the path.

    Raises:
        FileNotFoundError: There is none.
    """
    beside = Path(sys.prefix, "bin", "uv")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")
    if found is None:
        try:
            from uv import find_uv_bin
        except ImportError:
            raise FileNotFoundError("uv is not installed") from None
        found = find_uv_bin()
    return found


def run_uv(
    arguments: Sequence[str],
    *,
    stdin: str = "",
    variables: Mapping[str, str] | None = None,
    heard: Callable[[str], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> str:
    """Run uv to its end; it dies with this process.

    Args:
        arguments: Of the command. Nothing secret: anybody on the machine can read them.
        stdin: Its standard input.
        variables: Beside this process's own.
        heard: Called with each line that it says on its way.
        meanwhile: Called once it is at work.

    Returns:
        Its standard output.

    Raises:
        UvFailed: It failed.
        OSError: It can't be started.
    """
    parent = os.getpid()
    environ = {**os.environ, **(variables or {}), "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    # the node's own environment is not what uv is to look at
    environ.pop("VIRTUAL_ENV", None)
    with subprocess.Popen(
        [uv_path(), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd="/",
        text=True,
        errors="replace",
        # this process has one thread
        preexec_fn=lambda: processes.die_with_parent(parent),
    ) as uv:
        try:
            said, output = _talk(uv, stdin, heard, meanwhile)
        except BaseException:
            # an interrupt too: the end of the block waits for uv, which may take minutes
            uv.kill()
            raise
    if uv.returncode:
        text = "\n".join(said)
        how = f"it was killed by signal {-uv.returncode}" if uv.returncode < 0 else f"it ended as {uv.returncode}"
        raise UvFailed(last_words(text) or how, text)
    return output


def last_words(text: str) -> str:
    """What uv said of its failure, as one paragraph without credentials."""
    lines = [_ANSI.sub("", line).strip() for line in text.splitlines()]
    first = next((at for at, line in enumerate(lines) if line.startswith("error:")), None)
    kept = lines[first:] if first is not None else [line for line in lines if line][-3:]
    words = " ".join(line.removeprefix("error:").strip() for line in kept if line)
    words = without_url_credentials(" ".join(words.split()))
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]} ..."


def _talk(
    uv: subprocess.Popen[str],
    stdin: str,
    heard: Callable[[str], None] | None,
    meanwhile: Callable[[], None] | None,
) -> tuple[list[str], str]:
    """Feed it, and read both of its outputs until they end."""
    if heard is None:
        output, errors = uv.communicate(stdin)
        return errors.splitlines(), output
    if uv.stdin is None or uv.stderr is None or uv.stdout is None:
        raise OSError("uv was started without pipes")
    try:
        uv.stdin.write(stdin)
        uv.stdin.close()
    except BrokenPipeError:
        pass
    if meanwhile is not None:
        meanwhile()
    said: list[str] = []
    # of a command that is listened to, the standard output is a line or two: it waits in its pipe
    for line in uv.stderr:
        said.append(line.rstrip("\n"))
        del said[:-_KEPT_LINES]
        heard(said[-1])
    return said, uv.stdout.read()
