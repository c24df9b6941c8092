"""The pool service: one process per user and machine that owns the devices, the queue, the leases and the ledger.

It never unpickles anything and never imports torch.

__main__           starts the local pool
serving            starts a pool for clients on other machines
lifecycle          one pool per user and machine: lock, address file, shutdown when idle
service            assembles the parts
inventory          the newest inventory of the nodes, and calls that wait for a fresh one
device_history     use and memory of devices in the last ten minutes
adoption           runs of an earlier service that this one takes over
health             limits each fault of the service to one run or one reply
server             receives clients' messages, sends replies and events
event_feed         events of runs, sent to the clients that follow them
remote_clients     connections of clients on other machines, and their limits
bulk_port          their second connections, for file data, in a thread
clients            authorized and connected clients
permissions        what a client may ask for, and which run it means
requests           clients' requests and their replies
status             the pool's status, or its changes since a client asked
rank_requests      clients' requests to ranks, and streams to their ports
file_requests      uploads, payloads, and files of runs
submissions        checks and holds submitted runs; the files that describe their packages
line_cells         cells that notebooks send to their sessions' agents, which the pool records afterwards
environment_store  the files that describe environments, kept by the pool
format_capacity    devices, quotas and sessions by the names that users know
format_queue       what a waiting run waits for, in words
format_end         why a run ends or is warned, in words
format_refusal     why a pool can never place a request, in words
instructions       executes the scheduler's instructions: starts groups of ranks, and restarts failed ones
detached_run_notifier  runs the user's command of the setting `notify` when a detached run ends
reports            handles the nodes' reports about their runs
active_runs        the active runs, up to their final events
queue_updates      when waiting runs' followers get their runs' positions and reasons
pool_run           one run: its submission, its clients, its log, and the state of its group of ranks
run_log            a run's numbered and stored events
billing            records the runs' meters, and computes the pool's budget
ledger             one row per run; rows of cells in sessions are written with a short delay
ledger_database    the ledger's file and its schema
retention          keeps the state directory within its budget
tracker            which runs are written to MLflow
tracker_process    the process that writes them
scheduling/        which run gets which devices, and when (pure)
"""
