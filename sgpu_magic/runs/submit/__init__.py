"""A cell or call becomes a run of a pool: read, packed, described, handed over.

cell_source    a cell, read and packed with the names that it needs
pack_call      a function and its arguments, checked and packed
spec           what was packed and asked for becomes the run's spec, with no secret in it
placing        the pool that a run goes to, and what it asks for there
mlflow_target  where a run is tracked, and the git repository that it comes from
submit         the handing over, with the packages, code, variables and files that a run needs at its pool
"""
