"""The pool service: one process per user and machine. Owns the devices, the queue, the leases and the ledger.

It never unpickles anything and never imports torch.

__main__           starts the local pool
serving            starts a pool for clients of other machines
lifecycle          one pool per user and machine: lock, address file, end when idle
service            all of it together
parts              what all parts of the service work with, and what a fault in one costs
server             clients' messages in, answers and events out
remote_clients     clients of other machines, and how many connections there may be
clients            who may connect, and who is connected
permissions        what a client may ask for, and which run it means
requests           what clients ask, and the answers; the pool's status
rank_requests      what clients ask of ranks, and streams to their ports
file_requests      uploads, payloads, and files of runs
submissions        what clients submit: checked, held, brought before the scheduler
instructions       does what the scheduler says: orders groups of ranks, and those that failed again
reports            what the nodes say of their runs
adoption           runs that an earlier service left
active_runs        the runs that go on, and their last words
run_log            a run's events, numbered and kept
billing            what is written down of the runs' meters, and the pool's budget
ledger             every run's row; those of cells in sessions are written a moment later
ledger_database    the ledger's file and its schema
kept_environments  the files that describe runs' packages
retention          keeps the state directory within its budget
tracker            which runs are written to MLflow
tracker_process    one process that writes them
scheduling/        who gets what, when (pure)
"""
