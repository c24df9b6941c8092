"""What a front end is told of a run, and what it may ask: the same over a widget's comm and over the server.

messages       what goes between them: told, asked, answered, as JSON
picture        what is drawn but for the log's lines, as JSON

feed           a run's events -> at most 10 messages a second
answers        a front end's question -> its answer

snapshot       RunView -> Snapshot: what is drawn but for the log's lines, from
rank_cards     the grid of ranks,
bars           progress bars read from text (pure),
failure_block  the first failure,
words          the words around them; and
fitting        makes it small enough for one message

line_text      a line as it is drawn (pure)
log_order      which line of which rank is the n-th line of all (pure)
recent_lines   the newest lines, and rows made of them when somebody is told (pure)
log_reader     any lines of a run's logs, without reading all of them

live_views        one kernel's views: whether a run gets one, and what it needs for it
widget_publisher  opens it after 100 ms, feeds it, replaces it by the run's final form
rank_widgets      the comms of widgets that ranks have made
channels          its questions and their answers, also while the cell blocks the kernel
view_widget       the ipywidget itself
keyed_widget      what it and the panel's widget are
"""
