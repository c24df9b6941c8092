"""The options of `sgpu run` and `sgpu jobs`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

# what these modules define is repeated in short: a command that only parses loads none of them
_ABOUT = """Execute a notebook to its end and keep the executed copy.

TARGET is a notebook, a script (.py), or a job file (.yaml, .json, .toml) that names one. A notebook is an .ipynb file,
or a .py file in Databricks' source form or with percent cells (# %%); with jupytext any text form of its (.md, .Rmd).

what runs where:
  The notebook's kernel runs on this machine. Its %%distributed cells, sessions and @distributed functions run on
  the pool; what they do not say themselves is taken from --pool, --gpus, --type and so on.
  A notebook that has none of these, run with --gpus or --type, runs on the pool as a whole: a session of that many
  ranks is connected, and every cell runs on all of them (as after %sgpu_auto on). --cells ranks or here says it
  explicitly. A script runs on all ranks; what stands behind -- are its arguments (a .py file with percent cells that
  is given arguments runs as a script). A script with @distributed functions runs once, and they on the ranks.
  What a script prints goes to standard output as it comes; it leaves an executed copy only with --output.
"""
_CODES = """exit codes:
  0    every cell ran
  1    a cell failed: the notebook's own error, or its kernel died
  2    the command, the job file or an option in a cell can't be meant
  3    the pool, a node, the room on it or its environment failed: worth a retry
  124  the time (--timeout, or a run's own) was over
  130  interrupted;  143  terminated: the notebook's runs were ended first
"""
_PAIRED = {"-p": "--parameters", "--parameters": "--parameters", "-r": "--raw", "--raw": "--raw"}


def add_run(commands: Any, positive: Callable[[str], int]) -> None:
    """Add `sgpu run`.

    Args:
        commands: The parser's subcommands.
        positive: Reads a number above 0.
    """
    run = commands.add_parser(
        "run",
        help="execute a notebook, script or job file",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = run.add_argument
    add("target", metavar="TARGET")
    add("--pool", default="", help="the pool (default: the setting)")
    add("-n", "--gpus", type=positive, metavar="N", help="ranks, one per GPU")
    add("--type", metavar="TYPE", help="a10, h100, ..., cpu, any")
    add("--nodes", type=positive, metavar="N", help="nodes, each with as many of the ranks")
    add("--placement", default="", choices=("pack", "strict_pack", "spread"), help="how ranks lie on nodes (pack)")
    add("--min-memory", default="", metavar="40GB", help="least memory of each device")
    add("--env-version", default="", metavar="4|ai-4|FILE|NAME", help="the ranks' packages")
    add("--max-cost", metavar="5", help="stop each run before it costs more")
    add("-p", "--parameters", dest="parameter", action="append", default=[], metavar="NAME=VALUE",
        help="a parameter: a number, True, False, None, else a text; also as -p NAME VALUE")  # fmt: skip
    add("-r", "--raw", dest="raw_parameter", action="append", default=[], metavar="NAME=VALUE",
        help="a parameter that is a text whatever it looks like")  # fmt: skip
    add(
        "-y",
        dest="parameters_yaml",
        action="append",
        default=[],
        metavar="YAML",
        help="parameters as YAML or JSON text",
    )
    add("-f", "--parameters-file", action="append", default=[], metavar="FILE", help="parameters in YAML, JSON or TOML")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="a variable of the notebook and its ranks")
    add("--upload", action="append", default=[], metavar="PATH", help="a folder or file that the ranks find")
    add(
        "-o",
        "--output",
        default="",
        metavar="COPY",
        help="the executed copy (default: NAME.DATE-TIME.ipynb beside it; none of a script)",
    )
    add("--timeout", metavar="90s|30m|2h", help="longest time for all of it (default: none)")
    add("--retries", type=int, metavar="N", help="run it again after code 3, up to N times (default: 0)")
    add("--kernel", default="", metavar="NAME", help="the Jupyter kernel (default: the notebook's)")
    add("--cells", default="", choices=("auto", "ranks", "here"), help="where plain cells run (auto)")
    add("-v", "--verbose", action="store_true", help="also print what a notebook's cells print")
    add("--detach", action="store_true", help="return at once; it goes on without this terminal")
    add("--job-id", default="", help=argparse.SUPPRESS)
    add("--copy", default="", help=argparse.SUPPRESS)

    jobs = commands.add_parser("jobs", help="list what `sgpu run` executes", allow_abbrev=False)
    jobs.add_argument("-n", dest="number", type=positive, default=20, metavar="N", help="how many (20)")
    actions = jobs.add_subparsers(dest="action", metavar="ACTION")
    for name, about in (("log", "print what a detached one has said"), ("stop", "end one, and its runs")):
        actions.add_parser(name, help=about, allow_abbrev=False).add_argument("job", metavar="JOB")


def plain_words(words: Sequence[str]) -> list[str]:
    """Return a command line as the parser reads it.

    Of `sgpu run`, papermill's `-p NAME VALUE` becomes `-p NAME=VALUE`, and a script's own arguments are left out.
    """
    if words[:1] != ["run"]:
        return list(words)
    made: list[str] = []
    rest = list(words[: len(words) - len(script_arguments(words))])
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if word in _PAIRED and len(rest) > 1 and rest[0].isidentifier():
            made.append(f"{_PAIRED[word]}={rest.pop(0)}={rest.pop(0)}")
        else:
            made.append(word)
    return made


def script_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Return what stands behind `--`."""
    return tuple(words[list(words).index("--") + 1 :]) if "--" in words else ()
