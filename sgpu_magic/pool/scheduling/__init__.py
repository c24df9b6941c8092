"""The scheduler: who gets which devices, when. Pure: no clock, no socket, no thread.

scheduler          typed stimuli in, a list of instructions out
stimuli            both kinds, as types
run                a run and its meter; the service's is the same object, and has more
run_table          all of them, and the few ways in which one changes
placement_request  what a run's request means in this pool, or why it can't be placed
capacity           what the pool has, what a request takes, and how ranks are laid over nodes
placement          which devices a request gets, and what is in the way
queue_rules        whose turn it is in each line
fair_share         whose turn it is among users
session_rules      cells wait for their session and for each other
costs              prices, cost limits, and the pool's budget
words              where each waiting run stands and what it waits for
"""
