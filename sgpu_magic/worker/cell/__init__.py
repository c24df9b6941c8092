"""A cell on a rank: preparation, execution, display, failures and results.

cell_run           executes one order: prepare, run, reply
cell_trace         torch's profiler around a cell, for `--profile`
diagnosis          describes a failure: traceback, line of the cell, memory use
lone_training      detects that each rank trains alone, without exchanging gradients
shell              the rank's IPython shell, which runs cells and scripts
shell_commands     runs `!command` without a keyboard
event_loop         the event loop of cells, and the tasks in it
results            packs a cell's results, and answers questions between cells: completion, inspection, variables
variables          describes the variables that are set, without running the user's code
variable_details   the description of a variable's value, and the library classes that it is read from
array_details      describes numpy arrays, DataFrames, Series and indexes
failures           describes an exception, and frees what its frames hold
collective_errors  decides by where an exception was raised whether it comes from a collective
displays           sends displays and last expressions to the notebook, or to the enclosing `Output` widget
widgets            widgets' comm messages in both directions
edited_modules     finds and reloads the user's modules that were edited after their import
interrupted_imports  completes packages whose import was interrupted
"""
