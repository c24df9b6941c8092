"""What a front end is told of a run, and what it may ask: the same over a widget's comm and over the server.

messages    every record that goes between them, as JSON
snapshot    RunView -> Snapshot: what is drawn but for the log's lines
log_order   which line of which rank is the n-th line of all (pure)
log_reader  any lines of a run's logs, without reading all of them
feed        a run's events -> at most 10 messages a second
answers     a front end's question -> its answer
"""
