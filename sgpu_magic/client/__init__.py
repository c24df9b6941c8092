"""The client library of the kernel and the `sgpu` command: connects to pools, submits runs, receives their events.

pool              the API of one pool
pools             all pools of one process
pools_file        the list of pools, `pools.toml`: reading, adding, removing
pool_choosing     which pool a run goes to
this_machine      describes this process to the pool and the ranks; finds and starts the local pool
connector         makes the link to a pool: on first use, and again when the pool has died
link              the link to one pool service: routes replies and events, in a thread of its own
send_queue        queues to and from that thread
session_line      to the agent of a session's ranks: cells start without the pool service
transport         what carries a link's messages
local_transport   to the local pool's socket
pool_socket       a connection to a pool's socket on this machine
network_transport  to a pool on another machine, over connections that may break
remote_transport  to a served pool, over TCP
ssh/              to a machine that the user logs in to
bulk_connection   its second connection, for file data
payload_memory    shared memory in which payloads reach the pool, reused from run to run
upload_files      uploads to pools on other machines; files of a folder and their digests
blob_sender       sends the blobs that a pool lacks
run               the handle of a submitted run; the attachments of a submission
result            what a finished run returns
find_run          finds a run by the first digits of its id: its pool, or its directory on this machine
run_environment   the machine, packages and git commit of a recorded run; what differs between two
run_files         a run's files, read from its directory on this machine or through its pool
mirror            local copies of remote runs' files; which runs were submitted to remote pools
ledger            the local ledger, read only: runs, GPU-hours and cost
"""
