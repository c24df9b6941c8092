"""Engines: they provide the nodes on which ranks run. `local` has this machine as its only node.

engine_reports   what an engine reports to the pool service; merges ends, stacks and inventories of several nodes
engine           nodes that connect, reconnect and are lost; runs on them, each of which is one run to the pool service
local            this machine as the only node: its agent process and its device locks
device_locks     machine-wide device locks
lock_sockets     device locks as names in the kernel that all users share, the default
lock_files       device locks as files in a directory that may be hostile, with `lock_dir`
lock_obstacle    why a device can't be locked
distributed_run  one attempt of a run: commands to its nodes, and adoption after a restart of the pool service
joint_run        one attempt of a run: the events of its nodes, merged into one run
stale_runs       runs that were given up while their node was unreachable, and are ended when it has reconnected
node_files       serves files of the pool to nodes without access to its disk
ssh/             several machines that the user can log in to
ray/             an existing Ray cluster
"""
