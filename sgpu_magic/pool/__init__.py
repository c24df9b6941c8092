"""The pool service: one process per user and machine. Owns the devices, the queue, the leases and the ledger.

    lifecycle         one pool per user and machine: lock, address file, idle end
    server            clients' messages in, events out
    requests          what clients ask, and the answers; session_requests: of a session's ranks
    submissions       what they submit
    scheduler         who gets what, when (pure); stimuli, run_table, placement, and the rules: of the queue, of
                      sessions, of costs
    service           all of it together; instructions: does what the scheduler says; launches: has groups of ranks
                      started; guard: whom a fault of the service costs something
    node_reports      what the nodes say of their runs
    run_book          the runs it holds, and their last words
    run_log           a run's events, numbered and kept; event_feed: on their way to clients
    ledger            every run's row; later_ledger: those of cells in sessions a moment later
    ledger_database   the ledger's file; ledger_schema: its versions

It never unpickles anything and never imports torch.
"""
