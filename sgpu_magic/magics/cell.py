"""A cell and its options become what is submitted: checked, captured, packed, described."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.capture.names import names_read, names_stored
from sgpu_magic.capture.namespace import cell_sources, collect, submodules_read
from sgpu_magic.client.interpreter import this_owner
from sgpu_magic.client.pool import new_key
from sgpu_magic.config import Settings
from sgpu_magic.errors import CellSyntaxError, UsageError
from sgpu_magic.magics.arguments import CellOptions
from sgpu_magic.payload.pack import Packed, pack_namespace
from sgpu_magic.protocol.ids import new_id
from sgpu_magic.protocol.records import CellSource, Placement, RunSpec, Shipped

RANK_NAMES = ("rank", "local_rank", "world_size", "device")
_KERNEL_FILE = re.compile(r"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")
_WORD = re.compile(r"[^\W\d]\w*")
_HEAVY_BYTES = 100_000_000
_CPU_RANKS = 2
_ENV_VALUE = re.compile(r"""(--env[=\s]\s*['"]?\w+=)("[^"]*"|'[^']*'|[^\s'"]*)+""")
_DEFINITION = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Submission:
    """A run ready to be submitted."""

    spec: RunSpec
    packed: Packed
    key: bytes
    environ: dict[str, str]


def prepare(
    line: str, body: str, options: CellOptions, shell: InteractiveShell, settings: Settings, ranks: int
) -> Submission:
    """Check, capture and pack a cell. Nothing has started when this raises.

    Args:
        ranks: The number of ranks, decided by the caller.

    Raises:
        UsageError: The cell is empty, or an option names what does not exist.
        CellSyntaxError: It does not compile.
        SerializationError: A variable can't leave the notebook.
    """
    begin = time.perf_counter()
    magic_line = _without_values(f"%%distributed {line}".strip())
    source = f"{magic_line}\n{body}"
    try:
        read = names_read(source, transform=shell.transform_cell)
    except SyntaxError as error:
        raise _does_not_compile(error, source, cell_number(shell)) from None
    namespace = shell.user_ns
    names = collect(read, namespace, extra=options.extra, exclude=options.exclude)
    _check_outputs(source, options, names, shell)
    key = new_key()
    packed = pack_namespace(
        names,
        namespace,
        key,
        exclude=frozenset(options.exclude),
        submodules=submodules_read(_WORD.findall(body), names.values()),
    )
    shipped = Shipped(
        names=packed.names,
        total_bytes=packed.total_bytes,
        seconds=time.perf_counter() - begin,
        heavy=tuple((name, size) for name, size in packed.sizes.items() if size > _HEAVY_BYTES),
        notes=tuple(
            f"the notebook's variable `{name}` hides the rank's own `{name}`: --exclude {name} gives that back"
            for name in RANK_NAMES
            if name in packed.names
        ),
    )
    environ = {**os.environ, **options.variables}
    counts: Mapping[str, int] = getattr(shell.compile, "_filename_map", {})
    spec = RunSpec(
        run_id=new_id(),
        name=options.name or _name_of(body, cell_number(shell)),
        cell=CellSource(
            body=body,
            magic_line=magic_line,
            execution_count=cell_number(shell),
            linecache=cell_sources(packed.files, counts),
        ),
        placement=Placement(
            ranks=ranks,
            device_type=options.device_type or "any",
            allow_busy=options.allow_busy,
            stand_in=settings.stand_in == "cpu",
        ),
        outputs=options.outputs,
        owner=this_owner(notebook_name(shell), kernel_id(shell), cell_id(shell)),
        timeout_s=options.timeout_s,
        wait_s=options.wait_s,
        grace_s=options.grace_s,
        retries=options.retries,
        retry_any=options.retry_any,
        detach=options.detach,
        env_names=tuple(options.variables),
        shipped=shipped,
    )
    return Submission(spec, packed, key, environ)


def _without_values(magic_line: str) -> str:
    """The magic's line as it may be written down: values of --env are often secrets."""
    return _ENV_VALUE.sub(r"\1***", magic_line)


def check_cell(body: str) -> None:
    """Raise UsageError for a cell without code: it would start ranks for nothing."""
    if not any(text and not text.startswith("#") for text in map(str.strip, body.splitlines())):
        raise UsageError("the cell is empty. Write the code that each rank shall run under the %%distributed line.")


def _check_outputs(source: str, options: CellOptions, shipped: Mapping[str, object], shell: InteractiveShell) -> None:
    """Refuse what the cell can't return, rather than run it for nothing."""
    stored = names_stored(source, transform=shell.transform_cell)
    if stored is None:
        return
    for output in options.outputs:
        if output.name not in stored and output.name not in shipped:
            known = ", ".join(sorted(stored)) or "none"
            raise UsageError(
                f"--out names `{output.name}`, which the cell never sets. It sets: {known}. Set it in the cell or "
                "take it out of --out."
            )


def _does_not_compile(error: SyntaxError, source: str, number: int) -> CellSyntaxError:
    """Say it as IPython says it of a plain cell."""
    lines = source.splitlines()
    line = error.lineno or 1
    text = lines[line - 1] if line <= len(lines) else ""
    column = max((error.offset or 1) - 1, 0) - (len(text) - len(text.lstrip()))
    excerpt = f"    {text.strip()}\n    {' ' * max(column, 0)}^" if text.strip() else ""
    return CellSyntaxError(error.msg, f"Cell In[{number}], line {line}", excerpt)


def _name_of(body: str, execution_count: int) -> str:
    found = _DEFINITION.search(body)
    return found[1] if found is not None else f"cell {execution_count}"


def cell_number(shell: InteractiveShell) -> int:
    """The number of the cell that is running: newer IPythons count up before a cell runs, older ones after it."""
    running = getattr(shell.displayhook, "exec_result", None)
    return getattr(running, "execution_count", None) or shell.execution_count


def notebook_name(shell: InteractiveShell) -> str:
    """The notebook's file, where the front end tells: VS Code in the namespace, Jupyter in a variable."""
    path = shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
    return os.path.basename(str(path))


def kernel_id(shell: InteractiveShell) -> str:
    """The id that the Jupyter server knows this kernel by, "" where there is no server."""
    application = getattr(getattr(shell, "kernel", None), "parent", None)
    found = _KERNEL_FILE.fullmatch(os.path.basename(str(getattr(application, "connection_file", ""))))
    return found[1] if found is not None else ""


def cell_id(shell: InteractiveShell) -> str:
    """The id of the cell that is running, as JupyterLab and Notebook send it with each execution; "" elsewhere."""
    get_parent = getattr(shell, "get_parent", None)
    metadata = (get_parent() or {}).get("metadata", {}) if get_parent is not None else {}
    return str(metadata.get("cellId") or "")


def default_ranks(has_gpus: int) -> int:
    """Ranks without `--gpus`: all devices of a machine's one type, else two on CPU."""
    return has_gpus or _CPU_RANKS
