"""`spark` and `%sql`: a sentence that helps, or pyspark's session where pyspark is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from sgpu_magic.errors import UsageError

_MISSING = (
    "there is no Spark here, because pyspark is not installed. Read the data with pandas, pyarrow or datasets, or "
    "install pyspark: `spark` is then a local session, and `%sql` runs in it."
)
_OTHER_LANGUAGES = (
    "cells in {language} need a kernel or an IPython extension of that language; this kernel runs Python."
)


def is_installed() -> bool:
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # what IPython and inspect look for
            raise AttributeError(name)
        return getattr(self._session(), name)

    def __repr__(self) -> str:
        return "spark: a session is made when it is used" if is_installed() else f"spark: {_MISSING}"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(self.only_in_notebook)

    def _session(self) -> Any:
        if not is_installed():
            raise UsageError(_MISSING)
        session: Any = importlib.import_module("pyspark.sql").SparkSession.builder.getOrCreate()
        if self._namespace.get("spark") is self:
            self._namespace["spark"] = session
        return session


def run_sql(spark: Any, text: str, namespace: dict[str, object]) -> None:
    """Run a `%sql` cell, show the rows of its last statement and keep them as `_sqldf`.

    Raises:
        UsageError: pyspark is not installed.
    """
    for statement in filter(str.strip, text.split(";")):
        namespace["_sqldf"] = frame = spark.sql(statement.strip())
        if frame.columns:
            frame.show()


def refuse_language(language: str) -> None:
    """Raise UsageError for a cell in a language that this kernel does not run."""
    raise UsageError(_OTHER_LANGUAGES.format(language=language))
