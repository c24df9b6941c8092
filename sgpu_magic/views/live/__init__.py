"""The live view's protocol: updates and requests are the same over a widget's comm and over the Jupyter server.

schema        everything a live view shows except log lines, as JSON
messages      updates, requests and replies, as JSON

feed          updates for one front end, at most 10 messages a second, and replies to its requests
answers       replies to requests of the view

snapshot      `RunView` -> `Snapshot`: everything shown except log lines, small enough for one message
bars          progress bars parsed from text
widget_bars   progress bars that ranks show as widgets
run_progress  the progress of the ranks, from the last progress bar of each

log_index     maps the n-th line of the run to a rank and its line; holds the newest lines
log_streams   which lines ranks have written to stderr
log_reader    reads any lines of a run's logs without reading whole files

live_views    the views of one kernel: whether a run gets one, and the widget that shows it
rank_widgets  the comms of widgets that ranks have created
comm          requests and replies, also while a cell blocks the kernel
widgets       the ipywidgets: the view, also for front ends without a Jupyter kernel, and the panel
"""
