"""Databricks magics, and cells that use names which a Databricks notebook has without defining them."""

from __future__ import annotations

import pytest

from sgpu_magic.payload.notebook_text import TextCell, uses_databricks_names, with_cell_magic


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("%md # Title\nof *words*", TextCell("# Title\nof *words*", "markdown")),
        ("%md-sandbox\n<b>x</b>", TextCell("<b>x</b>", "markdown")),
        ("%sh\nls /\npwd", TextCell("%%bash --no-raise-error\nls /\npwd")),
        ("%sh ls /", TextCell("%%bash --no-raise-error\nls /")),
        ("%sh -e\nfalse", TextCell("%%bash -e\nfalse")),
        ("%python\na = 1", TextCell("a = 1")),
        ("%SQL select 1", TextCell("%%sql\nselect 1")),
        ("%r\nx <- 1", TextCell("%%R\nx <- 1")),
        ("%shell ls", TextCell("%shell ls")),
        ("%pip install x\n%sh ls", TextCell("%pip install x\n%sh ls")),
        ("%%sh\nls", TextCell("%%sh\nls")),
    ],
)
def test_a_cell_with_one_percent_sign(text: str, cell: TextCell):
    assert with_cell_magic(text) == cell


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("lr = float(dbutils.widgets.get('lr'))", True),
        ("import os\n  displayHTML('<b>x</b>')", True),
        ("df = spark.read.parquet('x')", True),
        ("%restart_python", True),
        ("x = 1\n%fs ls /", True),
        ("\n%sh\nls", True),
        ("%md # Title", True),
        ("%%sql\nselect 1", True),
        ("%run ./setup", True),
        ("%run '../common/setup' $env=\"dev\"", True),
        ("%run /work/setup.py '$env=dev'", True),
        ("%run train.py --lr 0.1", False),
        ("%run ./other.ipynb", False),
        ("%run -m package", False),
        ("# dbutils.widgets.get('lr')", False),
        ("from pyspark.sql import functions", False),
        ("import horovod.spark.keras", False),
        ("mydbutils.fs.ls('/')", False),
        ("x = 5 %sh", False),
        ("%%bash\nls", False),
        ("%%distributed\nprint(rank)", False),
    ],
)
def test_which_cells_use_these_names(source: str, uses: bool):
    assert uses_databricks_names(source) is uses
