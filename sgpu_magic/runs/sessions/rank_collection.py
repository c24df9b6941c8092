"""Several ranks as one: a session, or some of its ranks. Items and values are spread over them, names read and set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast, overload

from sgpu_magic.client.result import RunResult
from sgpu_magic.formatting import format_ranks
from sgpu_magic.options.values import check_name
from sgpu_magic.payload.parts import is_dtensor
from sgpu_magic.payload.parts import join_parts as joined_shards

if TYPE_CHECKING:
    from sgpu_magic.runs.handle import Run
    from sgpu_magic.runs.sessions.session import Session


class RankCollection:
    """A session, or some of its ranks: `session[0:2]`.

    Attributes:
        whole: The session.
        numbers: The ranks' numbers, ascending.
    """

    only_in_notebook = "it is the session itself, which runs code on its ranks from here."

    whole: Session
    numbers: tuple[int, ...]

    def map(self, function: Callable[..., Any], /, *items: Iterable[Any]) -> list[Any]:
        """Call a function on each item, spread over the ranks, and return the results in the order of the items.

        Each rank calls the function on a contiguous part of the items. For one run per item, use `sgpu_magic.map`.

        Args:
            function: The function to call; with several iterables it takes as many arguments, as for Python's `map`.
            items: The items.

        Raises:
            Exception: The exception of the rank that failed first.
        """
        numbers = self.numbers
        parts = dict(zip(numbers, split(list(zip(*items, strict=False)), len(numbers)), strict=True))

        # a function inside a function goes to the ranks by value
        def call_each(rank: int) -> list[Any]:
            return [function(*item) for item in parts[rank]]

        call_each.__name__ = call_each.__qualname__ = getattr(function, "__name__", "map")
        return [value for values in self.whole.call(call_each, ranks=numbers) for value in values]

    def scatter(self, values: Any, name: Any) -> None:
        """Split a sequence into contiguous parts and set `name` to one of them on each rank.

        The arguments may be in ipyparallel's order too: `scatter("x", values)`.

        Args:
            values: A list, tuple, range, array, tensor or DataFrame; any other iterable is split as a list. The first
                parts have one element more if the number is not a multiple of the number of ranks.
            name: The name to set.

        Raises:
            UsageError: `name` is not a name.
            SerializationError: A part can't be pickled.
        """
        if isinstance(values, str) and not isinstance(name, str):
            values, name = name, values
        check_name("the name to set", name)
        for rank, part in zip(self.numbers, split(values, len(self.numbers)), strict=True):
            self.whole.set_on_one(rank, name, part)

    def gather(self, name: str) -> Any:
        """Return the parts that the ranks have under `name`, put together in the order of the ranks.

        Lists and tuples are joined; arrays, tensors and DataFrames are concatenated along their first axis; the shards
        of a DTensor become the whole tensor. For other values, a list by rank is returned.

        Args:
            name: The name.

        Raises:
            UsageError: A rank has no such name.
            SerializationError: A value can't be pickled.
        """
        return join(self[name])

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.numbers)

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: int | slice | Iterable[int]) -> SomeRanks: ...
    def __getitem__(self, key: str | int | slice | Iterable[int]) -> list[Any] | SomeRanks:
        """Return the values of a name by rank, `session["loss"]`, or some of the ranks, `session[0:2]`.

        Raises:
            NoSuchName: A rank has no such name. It is a KeyError.
            IndexError: There is no such rank.
        """
        if isinstance(key, str):
            return self.whole.pull(f"{key}:all", ranks=self.numbers)
        return SomeRanks(self.whole, ranks_at(key, self.numbers))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a name on all of the ranks, as `push` does: `session["lr"] = 0.1`."""
        self.whole.push(ranks=self.numbers, **{name: value})


class SomeRanks(RankCollection):
    """Some of a session's ranks, with the session's methods: `session[0:2].run("...")`, `session[1]["loss"]`.

    Args:
        session: The session.
        numbers: The ranks' numbers, ascending.
    """

    def __init__(self, session: Session, numbers: tuple[int, ...]) -> None:
        self.whole, self.numbers = session, numbers

    def run(self, code: str, **options: Any) -> RunResult:
        """Run code on these ranks, as `Session.run` does."""
        return self.whole.run(code, ranks=self.numbers, **options)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on these ranks, as `Session.call` does."""
        return self.whole.call(function, *args, ranks=self.numbers, **kwargs)

    def call_async(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Call a function on these ranks, as `Session.call_async` does."""
        return self.whole.call_async(function, *args, ranks=self.numbers, **kwargs)

    def push(self, *names: str | Mapping[str, Any], **values: Any) -> None:
        """Set names on these ranks, as `Session.push` does."""
        self.whole.push(*names, ranks=self.numbers, **values)

    def pull(self, *names: str) -> Any:
        """Return names of these ranks, as `Session.pull` does."""
        return self.whole.pull(*names, ranks=self.numbers)

    def __repr__(self) -> str:
        return f"<{format_ranks(self.numbers)} of session {self.whole.name}>"


def ranks_at(key: int | slice | Iterable[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that an index, a slice or several indices select, ascending; negative ones count from the end.

    Raises:
        IndexError: There is no such rank.
    """
    if isinstance(key, slice):
        chosen = range(len(ranks))[key]
    else:
        chosen = [key] if isinstance(key, int) else list(key)
    absent = [at for at in chosen if not -len(ranks) <= at < len(ranks)]
    if absent:
        raise IndexError(f"there is no rank at {absent[0]}: there are {len(ranks)}")
    if not chosen:
        raise IndexError(f"{key!r} selects no rank: there are {len(ranks)}")
    return tuple(sorted({ranks[at] for at in chosen}))


def split(values: Any, parts: int) -> list[Any]:
    """Split values into contiguous parts; if they can't be equal, the first ones have one element more.

    Args:
        values: A sequence that can be sliced; any other iterable is split as a list.
        parts: The number of parts.
    """
    # rows of a DataFrame
    sliced: Any = getattr(values, "iloc", values)
    is_sliced = hasattr(sliced, "__getitem__") and hasattr(values, "__len__")
    if not is_sliced or isinstance(values, (str, bytes, dict)):
        sliced = values = list(cast("Iterable[object]", values))
    size, longer = divmod(len(values), parts)
    ends = [size * at + min(at, longer) for at in range(parts + 1)]
    found: list[Any] = [sliced[start:end] for start, end in pairwise(ends)]
    # a slice of a tensor is pickled with the storage of the whole
    return [part.clone() if _is_tensor(part) else part for part in found]


def join(parts: list[Any]) -> Any:
    """Put parts together again: lists, tuples, arrays, tensors, DataFrames; other values stay a list."""
    if all(isinstance(part, list) for part in parts) or all(isinstance(part, range) for part in parts):
        return [value for part in parts for value in part]
    if all(isinstance(part, tuple) for part in parts):
        return tuple(value for part in parts for value in part)
    if any(map(is_dtensor, parts)):
        whole = joined_shards(parts) if all(map(is_dtensor, parts)) else None
        return parts if whole is None else whole
    numpy, pandas, torch = (sys.modules.get(name) for name in ("numpy", "pandas", "torch"))
    if torch is not None and all(map(_is_tensor, parts)) and all(part.ndim for part in parts):
        return torch.cat(parts)
    if numpy is not None and all(isinstance(part, numpy.ndarray) and part.ndim for part in parts):
        return numpy.concatenate(parts)
    if pandas is not None and all(isinstance(part, (pandas.DataFrame, pandas.Series)) for part in parts):
        return pandas.concat(parts)
    return parts


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
