"""Runs on this node, from the launch to the `RunEnded` event, and their state besides their ranks.

node_run            the interface of all runs; runs with ranks: displays, widgets, exits
execution           one run's cell in its ranks: launch, collect results, find the root cause, stop, report the end
execution_kinds     the two kinds of execution: a run with its own, new ranks, and a cell in a session's ranks
preparing           a run whose packages, code and variables are being prepared; fetches what was sent along
session             a session: ranks that stay alive between cells
session_repair      renews process groups and replaces dead ranks of a session; its reports, logs, questions to ranks
rank_questions      questions to a session's idle ranks
session_logs        the log files of a session's ranks
session_events      events of a session: its cells, its dead ranks
run_files           a run's directory, payload and results; the directories of its own Ray cluster
ray_directories     directories of a run's own Ray cluster
run_memory          payload and results in memory, and the thread that copies them to disk
send_files_to_pool  sends run files to a pool on another machine
"""
