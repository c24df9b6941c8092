"""What users see of runs and pools: a run's events are folded into one `RunView`, rendered as text, HTML and errors.

The model of a run:

fold            `RunView`, the state that every view of a run renders
output          what the ranks have printed and displayed, split into segments at the displays
output_buffer   lines and displays in order; keeps the beginning and the end and counts what it drops between
usage           utilization and memory of ranks and their devices, as curves
metrics         what its code has logged to MLflow, as curves
phases          how long a run was queued, starting, running
chosen_options  the options that a run was submitted with
rank_models     widget models created by ranks, and their text and progress, which stay when the widgets are closed
run_notes       names of runs, and the sentences that events produce: notes, a failure in one line

The model in words:

format_run      state, ranks, location, what was sent and returned
format_summary  usage and cost of a run, the lines of a session's view, the line of a push or a pull
failure         a run's failure: its lines, what held the memory, and both as HTML
tracebacks      frames by the notebook's lines, and what is always shown of a traceback: the cell's lines, the message
stacks          stacks of the ranks, which ranks have not reached a collective, and stalls
format_pool     a pool's devices, nodes, budget and runs
units           the clock that views use, a run's times by it, and the alignment of columns

Renderers:

ansi            escape sequences to HTML, to colours, or removed
html            a run as static HTML
ranks           its ranks: the cards of the live view, and HTML
metric_charts   the metrics it has logged: charts of the live view, and HTML
html_style      the colours, boxes, tables and curves that HTML views share
history_table   the devices' use in the last ten minutes, with curves
pool_tables     `%sgpu_status` and `%sgpu_env`
variable_table  `%sgpu_who`
bundle          a run as text, as MIME bundles and as a record, as saved in the notebook
publisher       shows an active run: below its cell, in a terminal, or nowhere
cell_outputs    the outputs below a cell: the parts of a run, the progress of a sweep
remote_error    the exception that a failed run raises
help/           the help pages that errors name
live/           the live view and its requests
"""
