"""The Ray engine: an existing Ray cluster brings the machines and gangs the devices; the ranks are ours.

engine           in the pool service: leases, agents and nodes, as the pool wants them; knows no Ray
lease_requests   what a lease asks of Ray, and why one that was asked for is not there (pure)
inventory        what the cluster's nodes are to the scheduler (pure)
node_agents      which nodes have an agent, and which are to get or lose one
agent_listener   the socket that agents connect to, with its keys and port
driver_messages  what the engine and its process that speaks to Ray say to each other
driver_process   that process: started, listened to, started again; a cluster that hangs hangs nothing else
__main__         its program
cluster          its calls of Ray: nodes, agent actors, what a group has on which nodes
groups           its calls of Ray: placement groups
untyped          Ray's names, without types
on_node          what runs on a node as a Ray task or actor; travels by value, so it imports nothing of ours
agent_actor      the Ray actor that holds a node's agent
uplink           the agent process and its link to the pool
go_between       a script that stands between Ray's worker process and the agent
package_archive  our package, for nodes that have none; needs no Ray
jobs_api         Ray's Jobs API by HTTP; needs no Ray
deploy           a pool service as a Ray job

Only `untyped` imports Ray, for `__main__`, `cluster`, `groups` and `agent_actor`.
"""
