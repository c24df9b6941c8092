"""A cell or call becomes a run of a pool: read, packed, described, handed over.

cell_source    a cell's names, read before it runs
pack_call      a function and its arguments, checked and packed
redact         what of a run may be written down
placing        the pool that a run goes to, and what it asks for there
remote_inputs  packages, code and variables that a run needs at its pool
mlflow_target  where a run is tracked
submit         what is submitted, and the handing over
"""
