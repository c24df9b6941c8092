"""Ranks as processes of this node: forked, ordered about, listened to, stopped.

zygotes           the processes that fork ranks, one for each environment
rank_process      one rank, from the fork to the exit; its pipes -> log and batches
group             N of them, and those that take part in one run
standby_groups    groups that are kept ready
orders            a launch becomes orders for its ranks, with torchrun's variables; where they meet
stop              interrupt, release, TERM, grace, KILL
run_processes     a run's processes, their sockets, connections to their ports; the end of those left behind
"""
