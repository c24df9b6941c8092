"""Where ranks run: an engine of nodes. `local` is the one with this machine as its only node.

contract      what the pool service asks of an engine, and an engine of a node
engine        nodes, which come, go and come back
engine_runs   their runs, as one run each to the pool service
local         this machine as the only node, with locks of its devices; its agent process: found, started, listened to
device_locks  devices locked between pools of one machine, by files that are careful against hostile directories
run_on_nodes  one attempt of a run: what each node is ordered, and has from an earlier pool service
joint_run     the same attempt: what the nodes say of it, as one run
merge_parts   ends, stacks and inventories of several nodes made one
node_files    files of the pool for nodes that do not see them
ray/          an existing Ray cluster
"""
