"""The Ray engine: an existing Ray cluster brings the machines and gangs the devices; the ranks are ours.

engine          in the pool service: leases, agents and nodes, as the pool wants them; knows no Ray
leases          what the cluster is to the scheduler, what a lease asks of Ray, and why it is not there (pure)
agent_listener  the socket that agents connect to, with the keys of both ends, and its port
driver          the process that speaks to Ray: what it and the engine say to each other, and the agents it is to start
__main__        its program
cluster         its calls of Ray: nodes, agent actors, what a group has on which nodes
groups          Ray's names, without types, and its calls of Ray: placement groups
on_node         what runs on a node as a Ray task or actor; travels by value, so it imports nothing of ours
agent_actor     the Ray actor that holds a node's agent
uplink          the agent process and its link to the pool: the messages of both ends, and the node's end
go_between      a script that stands between Ray's worker process and the agent
jobs_api        Ray's Jobs API by HTTP; needs no Ray
deploy          a pool service as a Ray job

Only `groups` imports Ray, for `__main__`, `cluster` and `agent_actor`.
"""
