"""What a front end is told of a run, and what it may ask: the same over a widget's comm and over the server.

schema        what is drawn but for the log's lines, as JSON
messages      what goes between them: told, asked, answered, as JSON

feed          what a front end is told of a run, at most 10 messages a second, and what it is answered

snapshot      `RunView` -> `Snapshot`: what is drawn but for the log's lines, small enough for one message
rank_cards    its grid of ranks, with progress bars read from text

log_index     which line of which rank is the n-th of all; the newest lines
log_reader    any lines of a run's logs, without reading all of them

live_views    one kernel's views: whether a run gets one, and the widget that shows it
rank_widgets  the comms of widgets that ranks have made
comm          questions and their answers, also while the cell blocks the kernel
widgets       the ipywidget itself
"""
