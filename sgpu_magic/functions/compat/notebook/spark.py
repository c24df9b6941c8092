"""`spark` and `%sql`: PySpark if it is installed, else what works without a cluster."""

from __future__ import annotations

import getpass
import importlib
import importlib.util
import re
import sys
from typing import Any

from sgpu_magic.errors import UsageError

# pyspark's session if pyspark is installed, else an error with a remedy. `spark.sql("SELECT current_user()")` works
# without pyspark too, because notebooks build paths from its result.
_MISSING = (
    "there is no Spark here, because pyspark is not installed. Read the data with pandas, pyarrow or datasets, or "
    "install pyspark: `spark` is then a local session, and `%sql` runs in it."
)
_WHO = re.compile(
    r"\s*select\s+((?:current_user|session_user|user)\s*\(\s*\))(?:\s+(?:as\s+)?(\w+))?\s*;?\s*", re.IGNORECASE
)


def has_pyspark() -> bool:
    """Whether pyspark is installed."""
    return importlib.util.find_spec("pyspark") is not None


class Spark:
    """`spark`. The session is made when it is first used: it starts a Java process.

    Args:
        namespace: The notebook's namespace, where the session replaces this object.
    """

    only_in_notebook = (
        "spark is an object of the notebook's own process. Collect the rows that you need in a cell without "
        "%%distributed, as in `rows = df.toPandas()`, and use that variable on the ranks."
    )

    def __init__(self, namespace: dict[str, object]) -> None:
        self._namespace = namespace

    def sql(self, sqlQuery: str, *args: Any, **kwargs: Any) -> Any:
        """Run a statement in the session; without pyspark, only the question for the user's name."""
        who = None if has_pyspark() else _WHO.fullmatch(sqlQuery)
        return _User(who[2] or who[1]) if who is not None else self._session().sql(sqlQuery, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # IPython and inspect probe such names, which must not start the session
            raise AttributeError(name)
        return getattr(self._session(), name)

    def __repr__(self) -> str:
        return "spark: a session is made when it is used" if has_pyspark() else f"spark: {_MISSING}"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(self.only_in_notebook)

    def _session(self) -> Any:
        if not has_pyspark():
            raise UsageError(_MISSING)
        session: Any = importlib.import_module("pyspark.sql").SparkSession.builder.getOrCreate()
        if self._namespace.get("spark") is self:
            self._namespace["spark"] = session
        return session


class _Row(tuple[str, ...]):
    """A row with one column, whose value is also there by the column's name."""

    column: str

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(0 if key == self.column else key)

    def __getattr__(self, name: str) -> str:
        if name.startswith("__") or name != self.column:
            raise AttributeError(name)
        return self[0]


class _User:
    """The answer to `SELECT current_user()`: the name of this machine's user.

    Args:
        column: The column's name.
    """

    def __init__(self, column: str) -> None:
        self.columns = [column]
        self._row = _Row((getpass.getuser(),))
        self._row.column = column

    def collect(self) -> list[_Row]:
        return [self._row]

    def first(self) -> _Row:
        return self._row

    head = first

    def show(self) -> None:
        sys.stdout.write(f"{self.columns[0]}\n{self._row[0]}\n")


def run_sql(spark: Any, text: str, namespace: dict[str, object]) -> None:
    """Run a `%sql` cell, show the rows of its last statement and keep them as `_sqldf`.

    Raises:
        UsageError: pyspark is not installed.
    """
    for statement in filter(str.strip, text.split(";")):
        namespace["_sqldf"] = frame = spark.sql(statement.strip())
        if frame.columns:
            frame.show()
