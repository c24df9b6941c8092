"""Notebooks written for Databricks' documented Serverless GPU API: `serverless_gpu` can be imported.

    import sgpu_magic.functions.compat                     # or %load_ext sgpu_magic
    from serverless_gpu import distributed

finder           lets Python find `serverless_gpu` below, behind everything that is installed: the real package wins
serverless_gpu   the documented names, each made of this package's own
pool_choice      what the documented variables ask for, and what becomes of it here
"""

from __future__ import annotations

from sgpu_magic.functions.compat.finder import install

__all__ = ["install"]

install()
