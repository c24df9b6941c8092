"""The wire: what the client, the pool service, the agent, the zygote and the ranks say to each other.

Typed, frozen records and their codec. No socket, clock or thread here.

record        the base of every record and message; ids, checked before a path is made of them
codec         encoding of messages, and their framing on a byte stream
client        commands and replies between clients and the pool service; which link has its messages where
node          the same between the pool service and its nodes' agents
rank          orders to a rank and its reports, and what an idle rank is asked
zygote        orders to a zygote and its replies, and what the descriptors beside them carry
tracking      a run's place in MLflow, and what the pool service and its tracking process tell each other
events        what happened to a run
rank_events   those of its events that are about its ranks
run           what is submitted, where it starts, what it returns, what its directory keeps of it
attachments   what travels with a run: packed objects, packages, local code, uploads
failures      why a rank failed, where it was, what held its memory
states        the states of a run, and which follows which
files         blobs, files of runs' directories and TCP connections on their way over the links
pool_status   how a client finds and greets a pool, and what the pool says of itself
devices       one short name per GPU model; what a node has, what a run asks for, what it is granted
costs         prices, the meter, sums of money in words
user_limits   which users come first, and how many devices each may have
"""
