"""Rank processes on this node: forking, orders, messages, stopping.

zygotes           the processes that fork ranks, one per environment
rank_process      one rank from fork to exit, its stack, and the store by which ranks meet
rank_output       reads a rank's output pipes into its log and batches
group             N ranks of one zygote, and the ranks that take part in one run
orders            turns a launch into orders for its ranks: torchrun's variables and the rendezvous
stop              the stop path: interrupt, release, TERM, grace, KILL
run_processes     a run's processes: their usage, connections to their ports, killing leftovers
shared_memory     removes files that killed ranks have left in /dev/shm
"""
