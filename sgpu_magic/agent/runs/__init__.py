"""One run on this node, from its launch to its last word, and what belongs to it besides its ranks.

node_run            what the agent asks of everything that it runs; displays, widgets, MLflow, questions to idle ranks
execution           one run's cell in its ranks: launch, gather, find the root cause, stop, say the last word
fresh               a run whose ranks are its own
preparing           a run whose packages and code are being made ready
session             ranks that stay between cells
session_cell        a cell in these ranks
session_repair      keeps their group whole, reports it, and has the ranks' logs between cells
run_files           directory, payload and results
run_memory          payload and results in memory, and the thread that copies them to disk
send_files_to_pool  what the directories of a pool on another machine get
ray_place           where a run's own Ray cluster lives
"""
