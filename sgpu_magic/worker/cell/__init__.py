"""A cell in a rank: prepared, run, shown, described where it failed, and what it brings back.

cell_run        one order to execute: prepare, run, tell
diagnosis       how it failed; what held the memory when there was none left
shell           IPython in the rank
results         what it brings back, and the names that cells have set
failures        an exception described, and let go of
asking          the user's objects about themselves, whatever their classes do
displays        to the notebook, or into the widget whose block is under way
widgets         what widgets say and hear
questions       completion and inspection while no cell runs
edited_modules  the user's own modules, edited since their import
profiling       a trace of torch's profiler around it
"""
