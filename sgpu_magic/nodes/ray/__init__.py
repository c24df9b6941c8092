"""The Ray engine: an existing Ray cluster provides the nodes and gang-schedules the devices; sgpu runs the ranks.

engine          the engine in the pool service: leases, agents and nodes; does not import Ray
leases          translates between scheduler and Ray: inventory, lease requests, refusals (pure)
agent_listener  the socket that agents connect to, with the keys of both ends and its port
driver          messages between the engine and the driver process (the Ray client), and the agents it starts
__main__        the driver process
cluster         Ray calls of the driver process: nodes, agent actors, placement groups
agent_main      what Ray runs on nodes, without imports of this package: tasks, an actor class, the agent's parent
agent_actor     the body of the Ray actor that holds a node's agent
uplink          the agent process and its link to the pool: the messages of both ends, and the node's end
deploy          runs a pool service as a Ray job, over Ray's Jobs API; does not need Ray

Only `cluster` imports Ray, also for `__main__` and `agent_actor`.
"""
