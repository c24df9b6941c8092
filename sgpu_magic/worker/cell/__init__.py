"""A cell on a rank: preparation, execution, display, failures and results.

cell_run        executes one order: prepare, run, reply
diagnosis       describes a failure: traceback, line of the cell, memory use
shell           the rank's IPython shell
script          a script that runs as a cell: its arguments, file and lines
outputs         takes over the notebook's `_` and `Out`
stored          `%store` on a rank
results         packs a cell's results, and lists the names that cells have set
failures        describes an exception, and frees what its frames hold
asking          calls methods of the user's objects safely
displays        sends displays to the notebook, or to the enclosing `Output` widget
widgets         widgets' comm messages in both directions
questions       completion and inspection between cells
edited_modules  finds and reloads the user's modules that were edited after their import
profiling       runs torch's profiler around a cell
"""
