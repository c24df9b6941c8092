"""What `%%distributed` returns: the ranks' values and how it went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgpu_magic.protocol.events import RunEnded
from sgpu_magic.protocol.ids import short
from sgpu_magic.protocol.records import RunSpec, Shipped

_TEXT_LIMIT = 60
_REPR_LIMIT = 200


class RunResult:
    """The value of a distributed cell.

    Attributes:
        run_id: The run; `sgpu logs` takes it.
        name: Its name.
        values: The last expression's value by rank; None where there was none or it could not travel
            (see `problems`).
        problems: By rank, why a value stayed on its rank.
        lines: Lines printed, by rank.
        seconds: The cell's time on each rank, in seconds.
        queued_s, starting_s, running_s, total_s: The run's times in seconds.
        shipped: What was sent.
        directory: The run's directory: logs, `cell.py`, `_air.py`, `run.json`.
    """

    def __init__(self, spec: RunSpec, ended: RunEnded, values: Sequence[object], directory: Path) -> None:
        self.run_id = spec.run_id
        self.name = spec.name
        self.values = list(values)
        self.problems = {result.rank: result.value_problem for result in ended.results if result.value_problem}
        self.lines = [result.lines for result in ended.results]
        self.seconds = [result.seconds for result in ended.results]
        self.queued_s = ended.queued_s
        self.starting_s = ended.starting_s
        self.running_s = ended.running_s
        self.total_s = ended.total_s
        self.shipped: Shipped = spec.shipped
        self.directory = directory
        self._texts = [result.value_repr for result in ended.results]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rank: int) -> object:
        """The value of one rank."""
        return self.values[rank]

    def logs(self, rank: int) -> Path:
        """The file with everything that `rank` printed.

        Raises:
            IndexError: There is no such rank.
        """
        if not 0 <= rank < len(self.values):
            raise IndexError(f"run {short(self.run_id)} has ranks 0 to {len(self.values) - 1}, not {rank}")
        return self.directory / f"rank-{rank}.log"

    def __repr__(self) -> str:
        head = f"run {short(self.run_id)}: "
        if not any(self._texts):
            return f"{head}{len(self.values)} rank{'s' * (len(self.values) > 1)}, no value"
        texts = [_one_line(text) if text else "None" for text in self._texts]
        if len(set(texts)) == 1 and len(texts) > 1:
            shown = f"{texts[0]} on each of {len(texts)} ranks"
        else:
            shown = "[" + ", ".join(texts) + "]"
        if self.problems:
            rank, why = next(iter(self.problems.items()))
            shown += f" (shown only: rank {rank}'s value stayed there, {why})"
        return head + (shown if len(shown) <= _REPR_LIMIT or self.problems else shown[:_REPR_LIMIT] + " ...")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 4] + " ..."
