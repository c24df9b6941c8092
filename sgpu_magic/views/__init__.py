"""What a person sees of a run and of a pool: one `RunView` folded from a run's events, drawn as text, HTML and errors.

What a run is:

fold           `RunView`, everything about a run that a view draws
output         what its ranks have said: text to lines, and displays
output_buffer  keeps of that the beginning and the end
output_items   lines, displays and the gap, cut at the displays
usage          what its ranks and their devices use, as curves
rank_models    the widgets of its ranks
run_notes      what it is called, and the notes that events leave

The same in words:

words          state, ranks, place, what was shipped and returned
usage_words    what it used, and what it costs
session_words  what a session's view says; the line of a push or a pull
failure        one failure: who, where, how
failure_text   how a run's failure is told: lines, stall, memory
stacks         where the ranks are, and who has not come
pool_words     a pool's devices, nodes, budget and runs
units          numbers with their units
steady_clock   the time that views count by, whatever the machine's clock is set to

Drawn:

ansi           escape sequences as HTML, as colours, or dropped
text           a run as text
terminal       a run in a terminal, as it goes on
html           a run as static HTML
html_ranks     its ranks,
html_failure   its failure, and
html_style     the colours, boxes and curves they share
tables         tables in text and HTML; a kernel's packages
pool_tables    `%sgpu_status`
progress       the bar of a sweep
widget_forms   what stands for a rank's widget where none is drawn
bundle         MIME bundles as they are saved in the notebook
publisher      the outputs below a cell while a run goes on
remote_error   the exception that a failed run raises
help/          the pages of help that errors name
live/          the live view, and what it asks
"""
