"""One run on this node, from its launch to its last word, and what belongs to it besides its ranks.

node_run            what the agent asks of everything that it runs, and what all of it does alike
execution           one run's cell in its ranks: launch, gather, find the root cause, stop, say the last word
fresh               a run whose ranks are its own
preparing           a run whose packages and code are being made ready
session             ranks that stay between cells;  session_logs, session_news  where they write, what it tells
session_cell        a cell in these ranks
session_repair      keeps its group whole: dead ranks replaced;  regrouping  process groups connected anew
run_ranks           the ranks that take part in one run
gathering           what the ranks reported (no I/O);  displays  what they displayed
questions           questions to idle ranks of a session
run_files           directory, payload and results:
run_directory       what a run leaves on disk
run_memory          payload and results in memory;  background_copy  copies them to disk, off anybody's way
send_files_to_pool  what the directories of a pool on another machine get
tracking_answers    a run's place in MLflow, as its ranks ask for it
ray_place           where a run's own Ray cluster lives
"""
