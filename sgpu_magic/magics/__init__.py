"""`%%distributed`, `%sgpu_connect` and their like: parse, submit, show; nothing else.

parsing            how lines are read, and the options that several magics share
arguments          the options of `%%distributed`, `%%rank` and `%%ray_launch`
run_magics         the magics that run cells and look at runs
status             `%sgpu_status`, kept up to date
session_magics     those of sessions, with their options
environment_magic  `%sgpu_env`
cell_hooks         around plain cells: `%sgpu_auto`, names bound anew, ranks kept warm
completion         options, types and runs in the front end's completer
rank_completion    completion and `obj?` answered by a rank
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass

from IPython.core.inputtransformer2 import cell_magic
from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.magics import completion
from sgpu_magic.magics.cell_hooks import Assignments, AutoMode
from sgpu_magic.magics.environment_magic import EnvironmentMagics
from sgpu_magic.magics.rank_completion import RankQuestions
from sgpu_magic.magics.run_magics import DistributedMagics
from sgpu_magic.magics.session_magics import SessionMagics
from sgpu_magic.panel.kernel_endpoint import KernelEndpoint
from sgpu_magic.runs import packages
from sgpu_magic.runs.choice import default_choice

_OURS = ("%%distributed", "%%rank", "%%ray_launch")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What one shell has of us."""

    magics: DistributedMagics
    auto: AutoMode
    assignments: Assignments
    questions: RankQuestions | None
    door: KernelEndpoint


_loaded: dict[int, _Loaded] = {}


def load(shell: InteractiveShell) -> None:
    """Register the magics and warm the pool in the background."""
    if id(shell) in _loaded:
        return
    cleanup = shell.input_transformers_cleanup
    cleanup.insert(cleanup.index(cell_magic) if cell_magic in cleanup else 0, _help_without_body)
    auto = AutoMode(shell)
    magics = DistributedMagics(shell, auto)
    shell.register_magics(magics)
    shell.register_magics(SessionMagics(shell, auto))
    door = KernelEndpoint(magics.place)
    shell.register_magics(EnvironmentMagics(shell, door))
    completion.install(shell)
    assignments = Assignments(shell, auto)
    shell.events.register("post_run_cell", magics.warmth.after_cell)
    kernel = getattr(shell, "kernel", None)
    questions = RankQuestions(kernel, auto) if hasattr(kernel, "do_inspect") else None
    _loaded[id(shell)] = _Loaded(magics, auto, assignments, questions, door)
    if default_choice.pool_name(magics.place) == magics.pool.name:
        # where all runs go elsewhere none of these processes is needed
        magics.pool.warm_in_background()
    packages.of(magics.pool).begin()


def _help_without_body(lines: list[str]) -> list[str]:
    """Give `%%distributed -h` a body: IPython refuses a cell magic without one before the magic is asked."""
    asks = lines and lines[0].startswith(_OURS) and {"-h", "--help"} & set(lines[0].split())
    if asks and not any(line.strip() for line in lines[1:]):
        return [lines[0].rstrip("\n") + "\n", "pass\n"]
    return lines


def unload(shell: InteractiveShell) -> None:
    """Take the magics away, end the sessions and close the link to the pool; the pool goes on for others."""
    loaded = _loaded.pop(id(shell), None)
    if loaded is None:
        return
    completion.remove(shell)
    if loaded.questions is not None:
        loaded.questions.remove()
    loaded.auto.remove()
    shell.events.unregister("post_run_cell", loaded.magics.warmth.after_cell)
    loaded.assignments.remove()
    if _help_without_body in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(_help_without_body)
    for owner in (DistributedMagics, SessionMagics, EnvironmentMagics):
        for kind, names in owner.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
    loaded.door.close()
    default_choice.forget(loaded.magics.place)
    loaded.magics.close()
