"""A library in the notebook's kernel and in the `sgpu` command: reaches a pool, submits, follows. Never schedules.

pool            what one can ask of a pool
pools           all pools of one process
pools_file      the list of pools, `pools.toml`: read, added to and removed from
pool_choosing   which pool a run goes to
local_pool      the local pool: found, started, waited for until its end
this_process    the kernel's process as a pool and its ranks see it; its settings as they are now
connection      the one link of a kernel: made when needed, made again when the pool died
link            the socket's one thread; replies and events to whoever waits
wires           queues to and from that thread, and what carries a link's messages; to the local pool's socket
remote_wire     the same to a pool of another machine
submitter       hands runs over to a pool, and to its successor; where payloads lie meanwhile
upload_files    what goes along to other machines; files of a folder, and their digests
blob_sender     sends a pool what it lacks
run             the handle of a submitted run
result          what a finished run returns
find_run        which run is meant by the first digits of an id; its files, wherever its pool is
mirror          files of a run that were brought from another machine, and which runs were sent there
ledger          the local ledger, read only; runs, GPU-hours and cost from it
"""
