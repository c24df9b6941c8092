"""The wire: messages between the client, the pool service, the agents, the zygotes and the ranks.

Typed, frozen records and their codec. No sockets, clocks or threads.

base         the base of records and messages; run ids and their validation; states and kinds of runs
decoding     decodes data from outside: malformed data raises one kind of exception
codec        message encoding and framing on a byte stream; formats of a rank's output pipe and stack file
client       messages between clients and the pool service; a table of all links
node         messages between the pool service and its nodes' agents
rank         messages between an agent and its zygotes and ranks
session_line  messages between a session's notebook and the agent of its ranks
tracking     a run's MLflow target; messages between the pool service and its tracking process
events       events of a run
rank_events  events of a run's ranks; why a rank failed, where it was, what used its memory
run          what is submitted, where ranks start, what they return and are asked; the run directory's record
attachments  what is sent with a run: packed objects, packages, local code, uploads
files        blobs and files of run directories, carried over the links
streams      messages of TCP connections that are carried over the links
option_text  texts that name options, which each interface spells in its own way
pool_status  how a client finds and greets a pool, and the pool's status
devices      short names of GPU models, a node's devices, placement requests, leases
costs        what runs cost: hourly prices, billing by the second
"""
