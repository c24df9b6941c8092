"""Where ranks run: one contract, and the engines that keep it. `local` is this machine; others have many nodes.

contract        what the pool service asks of an engine, and an engine of a node
local           the engine of this machine
local_agent     its agent process: found, started, listened to
device_locks    devices locked between pools of one machine
lock_files      their files, careful against hostile directories
many_nodes      an engine of several nodes, which come, go and come back
many_runs       its runs, as one run each to the pool service
run_on_nodes    one attempt of a run: what each node is ordered
joint_run       the same attempt: what the nodes say of it, as one run
merge_parts     ends, stacks and inventories of several nodes made one
returned_nodes  nodes that had runs when an earlier service ended
node_files      files of the pool for nodes that do not see them
ray/            an existing Ray cluster
"""
