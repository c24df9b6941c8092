"""The Ray engine: an existing Ray cluster brings the machines and gangs the devices; the ranks are ours.

engine          in the pool service: leases, agents and nodes, as the pool wants them; knows no Ray
node_agents     which nodes have an agent, and which are to get or lose one
leases          what each run asked of Ray and has
inventory       what the cluster's nodes are to the scheduler (pure)
waiting         why a lease that was asked for is not there (pure)
driver_process  the child process that speaks to Ray, so that a cluster that hangs hangs nothing else
__main__        that process
cluster         its calls of Ray: nodes, agent actors
groups          its calls of Ray: placement groups, and which GPUs they have
on_node         what runs on a node as a Ray task
agent_actor     the Ray actor that holds a node's agent
uplink          the agent process and its link to the pool
deploy          a pool service as a Ray job

Only `__main__`, `cluster`, `groups`, `on_node`, `agent_actor` and `deploy` import Ray.
"""
