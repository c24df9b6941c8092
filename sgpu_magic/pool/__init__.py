"""The pool service: one process per user and machine. Owns the devices, the queue, the leases and the ledger.

    lifecycle   one pool per user and machine: lock, address file, idle end
    server      clients' messages in, events out
    scheduler   who gets what, when (pure); stimuli, placement
    service     does what the scheduler says
    run_book    the runs it holds, and their last words
run_log     a run's events, numbered and kept
    ledger      every run's row

It never unpickles anything and never imports torch.
"""
