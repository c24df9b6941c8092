"""What a person sees of a run and of a pool: one `RunView` folded from a run's events, drawn as text, HTML and errors.

What a run is:

fold           `RunView`, everything about a run that a view draws
output         what its ranks have said: text to lines, and displays; cut at these
output_buffer  lines, displays and the gap; keeps the beginning and the end
usage          what its ranks and their devices use, as curves
rank_models    the widgets of its ranks, and what stands for one where none is drawn
run_notes      what it is called, and the sentences that events leave: notes, a failure in a line

The same in words:

words          state, ranks, place, what was shipped and returned
summary_words  what it used and costs, what a session's view says; the line of a push or a pull
failure        how a run's failure is told: lines, stall, memory
stacks         where the ranks are, and who has not come
pool_words     a pool's devices, nodes, budget and runs
units          numbers with their units and in columns; the time that views count by

Drawn:

ansi           escape sequences as HTML, as colours, or dropped
text           a run as text, and in a terminal as it goes on
html           a run as static HTML, with its failure
html_ranks     its ranks
html_style     the colours, boxes, tables and curves they share
pool_tables    `%sgpu_status` and `%sgpu_env`
progress       the bar of a sweep
bundle         MIME bundles as they are saved in the notebook
publisher      the outputs below a cell while a run goes on
remote_error   the exception that a failed run raises
help/          the pages of help that errors name
live/          the live view, and what it asks
"""
