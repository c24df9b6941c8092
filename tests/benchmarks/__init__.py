"""Benchmarks: this package and its peers, measured in the same run on the same machine.

`python -m tests.benchmarks` or `python tests/benchmarks/run.py` from the repository's root; see `--help`.
"""
