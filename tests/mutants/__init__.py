"""Planted faults, each run against the tests of its promise only: `make mutants` shows which ones the tests catch.

mutants.toml  the faults: what each changes, which promise it breaks, which tests should fail
patterns      code in modules, found by its syntax, and what replaces it
__main__      plants one after the other in a copy of the tree, runs its tests there, and reports
renames       renames private methods in such a copy, where no test should fail
"""
