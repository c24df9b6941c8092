"""`sgpu torchrun`: torchrun's command line, executed as `sgpu run`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from sgpu_magic.cli import run as run_command
from sgpu_magic.cli.main import CommandParser, command_parser, normalized, note, whole_number
from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.argparse_form import add_option
from sgpu_magic.options.table import MOST_RETRIES

# reasons why options of torchrun have no effect here, with these options
_WITHOUT_EFFECT = {
    "the pool arranges the rendezvous": (
        "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port", "local-addr",
    ),
    "every rank has a log: `sgpu logs RUN --rank N`": (
        "log-dir", "redirects", "tee", "logs-specs", "duplicate-stdout-filters", "duplicate-stderr-filters",
    ),
    "the lines of all ranks are printed, each with its rank": ("local-ranks-filter",),
    "the ranks are forked from a process that has imported torch": ("start-method",),
    "the end of a rank is reported at once": ("monitor-interval",),
    "the run's directory has all its events": ("event-log-handler",),
    "all ranks have the role `default`": ("role",),
    "the ranks may run on all cores": ("numa-binding",),
    "SIGINT and SIGTERM end the ranks": ("signals-to-handle",),
    "the setting grace_s is the time that ranks have after SIGTERM": ("shutdown-timeout",),
}  # fmt: skip
# options that torchrun reads from the command line only
_WITHOUT_VARIABLE = ("logs-specs", "numa-binding")
_SHORT = {"redirects": ["-r"], "tee": ["-t"]}
# option of torchrun -> why it is refused, and what to do instead
_REFUSED = {
    "no-python": "the ranks run Python: start the program with subprocess in a script",
    "run-path": "give the script's path",
    "virtual-local-rank": "LOCAL_RANK is the rank on its node: use it as the GPU's index",
}
_ABOUT = """Start a script as torchrun does, on the ranks of a pool: `sgpu run` with torchrun's options.

What follows the script are its own arguments. Options of torchrun that have no effect on a pool are accepted with a
note. As torchrun does, the command reads defaults from PET_ variables, such as PET_NPROC_PER_NODE.
"""


def command_line_of(values: argparse.Namespace) -> list[str]:
    """Return the command line of `sgpu run` for torchrun's options.

    Raises:
        UsageError: An option has no equivalent.
    """
    for name, why in _REFUSED.items():
        if getattr(values, name.replace("-", "_")):
            raise UsageError(f"--{name} has no equivalent here: {why}.")
    nodes = _nodes(values.nnodes)
    if values.node_rank not in ("", "0"):
        raise UsageError("--node-rank has no equivalent here: the pool has the machines. Start the command once.")
    words = ["run", "--as-script", *_devices(values, nodes)]
    module = values.script if values.module else ""
    passed = {"module": module, "pool": values.pool, "min-memory": values.min_memory}
    passed |= {"env-version": values.env_version, "restarts": values.max_restarts}
    for name, value in passed.items():
        words += [f"--{name}", str(value)] if value else []
    return [*words, _file_of(module) if module else values.script, "--", *values.arguments]


def notes(values: argparse.Namespace) -> list[str]:
    """Return a sentence for each given option that has no effect."""
    found: list[str] = []
    for why, names in _WITHOUT_EFFECT.items():
        given = [_spelled(name, values) for name in names if getattr(values, name.replace("-", "_"))]
        if given:
            found.append(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}.")
    return found


def _spelled(name: str, values: argparse.Namespace) -> str:
    """Return the option as it was given: on the command line, or as a variable of the environment."""
    attribute = name.replace("-", "_")
    variable = _variable(name)
    return variable if os.environ.get(variable) == getattr(values, attribute) else f"--{name}"


def _nodes(text: str) -> int:
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isascii() and least.isdigit() and most.isascii() and most.isdigit() and int(least) > 0):
        raise UsageError(f"--nnodes is {text!r}; a number of nodes is needed.")
    if least != most:
        raise UsageError(f"--nnodes {text} asks for an elastic job, and a run has a fixed number of nodes: give one.")
    return int(least)


def _devices(values: argparse.Namespace, nodes: int) -> list[str]:
    """Return the options for the number of ranks, the nodes and the type."""
    each, kind = values.nproc_per_node, values.type or ""
    if each == "cpu":
        each, kind = str(os.cpu_count() or 1), kind or "cpu"
    typed = ["--type", kind] if kind else []
    if each in ("gpu", "auto"):
        if nodes > 1:
            raise UsageError(f"--nproc-per-node {each} on {nodes} nodes: give the number of ranks on each node.")
        # all devices of the pool
        return typed
    if not (each.isascii() and each.isdigit() and int(each) > 0):
        raise UsageError(f"--nproc-per-node is {each!r}; a number above 0, gpu, cpu or auto is needed.")
    return ["--gpus", str(int(each) * nodes), *(["--nodes", str(nodes)] if nodes > 1 else []), *typed]


def _file_of(module: str) -> str:
    """Return the file of a module, which is looked for in the working directory first, as by `python -m`."""
    # a console script does not have the working directory in its path
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except ImportError as error:
        raise UsageError(f"-m {module}: {error}.") from None
    finally:
        sys.path.pop(0)
    if found is None or not found.origin or not found.origin.endswith(".py"):
        raise UsageError(
            f"-m {module}: there is no such module with a source file in {os.getcwd()} or the Python path."
        )
    return found.origin


# ---------------------------------------------------------------- the command


def _variable(name: str) -> str:
    """Return the variable that torchrun reads the option's default from (torch/distributed/argparse_util.py)."""
    return f"PET_{name.replace('-', '_').upper()}"


def _default(name: str, otherwise: str) -> str:
    return otherwise if name in _WITHOUT_VARIABLE else os.environ.get(_variable(name), otherwise)


def _is_set(name: str) -> bool:
    """Whether the variable of an option without a value sets it, as torchrun reads it.

    Raises:
        UsageError: It is not a number.
    """
    text = os.environ.get(_variable(name), "0")
    try:
        return bool(int(text))
    except ValueError:
        raise UsageError(f"{_variable(name)} is {text!r}; torchrun takes 0 or 1.") from None


def _flags(name: str) -> list[str]:
    both = [f"--{name}", f"--{name.replace('-', '_')}"] if "-" in name else [f"--{name}"]
    return [*_SHORT.get(name, []), *both]


def _options(parser: CommandParser) -> None:
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(*_flags("nproc-per-node"), default=_default("nproc-per-node", "1"), metavar="N|gpu|cpu|auto",
        help="ranks on each node; gpu and auto are all devices of the pool (default: 1)")  # fmt: skip
    add(*_flags("nnodes"), default=_default("nnodes", "1"), metavar="N", help="number of nodes (default: 1)")
    restarts = whole_number(0, MOST_RETRIES, f"a number from 0 to {MOST_RETRIES}")
    add(*_flags("max-restarts"), type=restarts, default=_default("max-restarts", "0"), metavar="N",
        help="start all ranks anew after a failure, up to N times (default: 0)")  # fmt: skip
    add(
        "-m",
        "--module",
        action="store_true",
        default=_is_set("module"),
        help="the script is the name of a module, as for `python -m`",
    )
    add(
        *_flags("node-rank"),
        default=_default("node-rank", ""),
        metavar="0",
        help="the pool has the machines: start the command once",
    )
    add_option(parser, "pool", metavar=None, help="pool to run on (default: the setting pool)")
    add_option(parser, "type", help="GPU type: a10, h100, ..., cpu or any")
    add_option(parser, "min-memory", help="memory that each GPU must have")
    add_option(parser, "env-version", metavar="4|ai-4|FILE|NAME", help="packages of the ranks")
    add("--standalone", action="store_true", help="accepted: ranks on one machine need nothing else")
    add(*_flags("use-env"), action="store_true", help="accepted: ranks have their LOCAL_RANK in the environment")
    for why, names in _WITHOUT_EFFECT.items():
        for name in names:
            add(*_flags(name), default=_default(name, ""), metavar="VALUE", help=f"no effect: {why}")
    for name, why in _REFUSED.items():
        add(*_flags(name), action="store_true", default=_is_set(name), help=f"refused: {why}")
    add("script", metavar="SCRIPT", help="script, or with -m module")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.does(_do)


def _do(values: argparse.Namespace) -> int:
    words: Sequence[str] = command_line_of(values)
    for sentence in notes(values):
        note(sentence)
    options = command_parser(words).parse_args(normalized(words))
    options.words = list(words)
    return run_command.run(load_settings(), options, sys.stdout, sys.stderr)


COMMANDS = {"torchrun": _options}
