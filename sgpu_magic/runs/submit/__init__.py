"""Submission of cells and calls as runs: read, packed, described, sent to a pool.

cell_source      reads a cell and packs it with the names, inputs and results that it needs
cell_name        the name of a cell's run without --name
history          the notebook's inputs and results that are sent with a cell
pack_call        checks and packs a function and its arguments
spec             builds the run's spec from packed code and options
tracking_target  where a run is tracked: MLflow's store and experiment
target           fills in the notebook's choice, chooses the pool and what to request there
named_files      the small files that a cell's text names
submit           sends a run with the packages, code, variables and files that it needs
"""
