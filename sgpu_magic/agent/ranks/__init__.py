"""Ranks as processes of this node: forked, ordered about, listened to, stopped.

zygotes           the processes that fork ranks, one for each environment
group             N ranks, from the fork to the exit;  standby_groups  those kept ready
orders            a launch becomes orders for its ranks;  variables  torchrun's variables for one
rendezvous_point  where the ranks of a run meet;  interfaces  which network interface has an address
output            pipes -> log and batches
stop              interrupt, release, TERM, grace, KILL;  signals  what a process handles itself
rank_connections  the sockets between ranks, which a stop has them shut
listening         the ports that a run listens on;  forwarding  connections to them
leftovers         what a run's processes left behind
"""
