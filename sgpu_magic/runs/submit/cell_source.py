"""Reads a cell's source, finds the names that it needs, and packs them with the notebook's history."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from sgpu_magic.errors import CellSyntaxError, UsageError
from sgpu_magic.options import notebook_job
from sgpu_magic.options.option_records import RunOptions
from sgpu_magic.payload.call import RANK_NAMES
from sgpu_magic.payload.names import CellNames, names_in
from sgpu_magic.payload.namespace import collect, submodules_read
from sgpu_magic.runs.notebook import cell_number, future_flags
from sgpu_magic.runs.submit import spec
from sgpu_magic.runs.submit.cell_name import cell_name
from sgpu_magic.runs.submit.history import history
from sgpu_magic.runs.submit.spec import PackedCode
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.events import as_warning
from sgpu_magic.wire.run import CellSource, OutputName

if TYPE_CHECKING:
    from sgpu_magic.runs.kernel_context import KernelContext

_WORD = re.compile(r"[^\W\d]\w*")


class Cell(msgspec.Struct, frozen=True):
    """A cell that has been read.

    Args:
        source: What the ranks execute; the magic's line is without values of `--env`.
        names: The names that it reads and may set.
        read: Values of the notebook that it reads, by name.
        history: Those in which IPython keeps the notebook's inputs and results.
        begin: When it was read, by the performance counter.
    """

    source: CellSource
    names: CellNames
    read: dict[str, object]
    history: dict[str, object]
    begin: float


def read_cell(context: KernelContext, magic_line: str, body: str, options: RunOptions) -> Cell:
    """Parse a cell and find the names that it needs.

    Args:
        context: The kernel's context.
        magic_line: The magic's line; "" if the body is the whole cell.
        body: The code below the magic's line.
        options: The options; `extra` and `exclude` are used.

    Raises:
        CellSyntaxError: The cell does not compile.
        UsageError: An option names a variable that does not exist.
    """
    begin = time.perf_counter()
    job = notebook_job.of_process()
    script = job.script if job.arguments else ""
    # below the magic's line, which a script does not have
    magic_line = "" if script else without_values(magic_line)
    number = cell_number(context.shell)
    source = f"{magic_line}\n{body}" if magic_line else body
    try:
        names = names_in(source, transform=str if script else transform_of(context.shell))
    except SyntaxError as error:
        raise _does_not_compile(error, source, number, script) from None
    read = collect(names.read, context.namespace, extra=options.extra, exclude=options.exclude)
    past = history(names.read - read.keys(), body, context.namespace, options.exclude)
    cell = CellSource(
        body=body,
        magic_line=magic_line,
        execution_count=number,
        future_flags=future_flags(context.shell),
        file=script,
        arguments=job.arguments,
        module=job.module if script else "",
    )
    return Cell(cell, names, read, past, begin)


def pack_cell(
    context: KernelContext,
    cell: Cell,
    options: RunOptions,
    *,
    names: Collection[str] | None = None,
    stay: frozenset[str] = frozenset(),
    not_own: Collection[str] = (),
    notes: Iterable[str] = (),
) -> PackedCode:
    """Pack a cell with the names that it needs. The defaults are for new ranks, which have no names yet.

    Args:
        context: The kernel's context.
        cell: The cell.
        options: The options; `outputs` and `exclude` are used.
        names: The names to ship; None means all that the cell reads.
        stay: Names that the cell reads and that the ranks already have.
        not_own: Names whose values on the ranks differ from the notebook's.
        notes: Sentences for the run's view.

    Raises:
        SerializationError: A variable can't be pickled.
    """
    past = {name: value for name, value in cell.history.items() if name not in not_own}
    code = spec.pack(
        context,
        RunKind.CELL,
        cell_name(cell.source),
        cell.source,
        (cell.read if names is None else {name: context.namespace[name] for name in names}) | past,
        begin=cell.begin,
        outputs=options.outputs,
        exclude=stay.union(options.exclude),
        submodules=submodules_read(_WORD.findall(cell.source.body), cell.read.values()),
    )
    hidden = (
        as_warning(f"the notebook's variable `{name}` hides the rank's own `{name}`: --exclude {name} gives that back")
        for name in RANK_NAMES
        if name in code.packed.names
    )
    own = {name: value for name, value in cell.read.items() if name not in not_own}
    shipped = replace(code.shipped, notes=(*notes, *hidden))
    return replace(code, shipped=shipped, parameters=spec.scalars(own))


def check_outputs(cell: Cell, outputs: Iterable[OutputName]) -> None:
    """Check before the run that the cell sets the names to bring back from new ranks.

    Raises:
        UsageError: It never sets one of them.
    """
    if (stored := cell.names.stored) is None:
        return
    for output in outputs:
        if output.name not in stored and output.name not in cell.read:
            known = ", ".join(sorted(stored)) or "none"
            raise UsageError(
                f"--out names `{output.name}`, which the cell never sets. It sets: {known}. Set it in the cell or "
                "take it out of --out."
            )


def has_code(body: str) -> bool:
    """Whether a cell has more than blank lines and comments."""
    return any(text and not text.startswith("#") for text in map(str.strip, body.splitlines()))


def without_values(magic_line: str) -> str:
    """Return the magic's line without values of `--env`, which are often secrets."""
    words = shlex.split(magic_line, comments=True)
    redacted = [_without_value(word, before) for word, before in zip(words, ["", *words], strict=False)]
    return " ".join(redacted) if any(word == "--env" or word.startswith("--env=") for word in words) else magic_line


def _without_value(word: str, before: str) -> str:
    option, setting = ("--env=", word.removeprefix("--env=")) if word.startswith("--env=") else ("", word)
    if not option and before != "--env":
        return shlex.quote(word)
    return f"{option}{shlex.quote(setting.partition('=')[0])}=***"


def _does_not_compile(error: SyntaxError, source: str, number: int | None, file: str) -> CellSyntaxError:
    """Return the error in the form that IPython uses for plain cells."""
    lines = source.splitlines()
    line = error.lineno or 1
    text = lines[line - 1] if line <= len(lines) else ""
    column = max((error.offset or 1) - 1, 0) - (len(text) - len(text.lstrip()))
    excerpt = f"    {text.strip()}\n    {' ' * max(column, 0)}^" if text.strip() else ""
    cell = "the code" if number is None else f"Cell In[{number}]"
    if file:
        cell = f"File {file}"
    return CellSyntaxError(error.msg, f"{cell}, line {line}", excerpt)


def transform_of(shell: Any) -> Callable[[str], str] | None:
    """Return the shell's transform of cells, None without a shell.

    It skips the transformer of `%sgpu_auto`, which has the attribute `sends_cells` and would rewrite the cell's body.
    """
    if shell is None:
        return None
    manager = shell.input_transformer_manager

    def transform(source: str) -> str:
        lines = (source if source.endswith("\n") else f"{source}\n").splitlines(keepends=True)
        for each in (*manager.cleanup_transforms, *manager.line_transforms):
            if not getattr(each, "sends_cells", False):
                lines = each(lines)
        lines = manager.do_token_transforms(lines)
        for each in shell.input_transformers_post:
            lines = each(lines)
        return "".join(lines)

    return transform
