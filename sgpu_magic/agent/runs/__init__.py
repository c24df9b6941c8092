"""Runs on this node, from the launch to the `RunEnded` event, and their state besides their ranks.

node_run            the interface of all runs
execution           one run's cell in its ranks: launch, collect results, stop, report the end
execution_kinds     the two kinds of execution: a run with its own, new ranks, and a cell in a session's ranks
session             a session: ranks that stay alive between cells
preparing           a run whose packages, code and variables are being prepared; fetches its inputs

Parts of an execution or a session:

rank_supervisor     its ranks: what they show, how they die, what they leave behind
cause_search        how long it waits for the failure that is the root cause
hang_stacks         where its ranks were when it hung or was timed out
unfinished_work     what its ranks still finish after the cell: threads, executors, exit functions
tracking_requests   its ranks' requests for the MLflow target
session_repair      renews process groups and replaces dead ranks of a session
session_events      events of a session: its cells, its dead ranks
session_logs        the log files of a session's ranks
rank_questions      questions to a session's idle ranks
run_files           its directory, payload and results
run_memory          payload and results in memory, and the thread that copies them to disk
ray_directories     directories of its own Ray cluster
send_files_to_pool  sends run files to a pool on another machine
"""
