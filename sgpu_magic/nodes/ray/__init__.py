"""The Ray engine: an existing Ray cluster brings the machines and gangs the devices; the ranks are ours.

engine           in the pool service: leases, agents and nodes, as the pool wants them; knows no Ray
asking           what a lease asks of Ray, and why one that was asked for is not there (pure)
inventory        what the cluster's nodes are to the scheduler (pure)
node_agents      which nodes have an agent, and which are to get or lose one
door_keys        the keys and the port of the door that they come in by
messages         what the engine and its process that speaks to Ray say to each other
driver_process   that process: started, listened to, started again; a cluster that hangs hangs nothing else
__main__         its program
cluster          its calls of Ray: nodes, agent actors
groups           its calls of Ray: placement groups, and which GPUs they have
on_node          what runs on a node as a Ray task or actor; travels by value
agent_actor      the Ray actor that holds a node's agent
uplink           the agent process and its link to the pool
package_archive  our package, for nodes that have none
jobs_api         Ray's Jobs API by HTTP; needs no Ray
deploy           a pool service as a Ray job

Only `untyped` imports Ray, for `__main__`, `cluster`, `groups`, `lease_parts` and `agent_actor`.
"""
