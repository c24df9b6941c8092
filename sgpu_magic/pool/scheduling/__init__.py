"""The scheduler: which run gets which devices, and when. Pure: no clock, no socket, no thread.

scheduler          typed stimuli in, a list of instructions out
stimuli            types of stimuli and instructions
run                a run and its meter; the service's `PoolRun` has one
run_table          the table of runs, and the few operations that change one
placement_request  what a run's request means in this pool, or why it can't be placed
capacity           what the pool has, what a request takes, and how ranks are laid out over nodes
placement          which devices a request gets, and what blocks it
queue_rules        which run is next in each queue
fair_share         which user is next
costs              prices, cost limits, and the pool's budget
queue_status       finds each waiting run's position, and what it waits for
wait_reason        a waiting run's status: facts, which `pool.format_queue` words
end_reason         why a run ends or is warned: facts, which `pool.format_end` words
placement_refusal  why a request can never be placed: facts, which `pool.format_refusal` words
"""
