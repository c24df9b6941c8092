"""A library in the notebook's kernel and in the `sgpu` command: reaches a pool, submits, follows. Never schedules.

pool              what one can ask of a pool
pools             all pools of one process
pools_file        the list of pools, `pools.toml`
pools_edits       adding pools to it and removing them
pool_choosing     which pool a run goes to
local_pool        the local pool: found, started, waited for until its end
connection        the one link of a kernel: made when needed, made again when the pool died
keys              this user's own key, for pools of other machines
link              the socket's one thread; replies and events to whoever waits
queues            messages and events between that thread and others
wires             what carries a link's messages; to the local pool's socket
remote_wire       the same to a pool of another machine
forwarding        local ports that lead to ports of a run
submitter         hands runs over to a pool, and to its successor
payload_memory    where a payload's bytes lie while they are shipped
attachments       what goes along with a run
upload_files      files of a folder that goes along, and their digests
blob_sender       sends a pool what it lacks
sent_runs         which runs were given to pools of other machines
interpreter       this process as a pool and its ranks see it
run               the handle of a submitted run
result            what a finished run returns
find_run          which run is meant by the first digits of an id
files_of_run      a run's files, wherever its pool is
mirror            files of a run that were brought from another machine
ledger_file       the local ledger, read only
usage             runs, GPU-hours and cost from it
current_settings  settings that follow `%env`
"""
