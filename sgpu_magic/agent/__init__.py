"""One agent per node: starts ranks, takes their output, finds the root cause, ends them. Lives across runs.

__main__      the process: a socket to its pool, then `service`
service       what the pool says, and to whom it goes
survive       how the agent outlives pool services: introduced to each, waiting for the next, let in by it
reports       what the agent says, numbered by run and kept until it is written down
run_registry  the runs that it holds
launch        from a launch to its ranks; what it needs comes first; the kernel's place, in terms of what is here
environments  the packages that runs want, and the processes that build them
failures      what ranks reported or died of, secrets blanked, and which failure is to blame
faults        what a callback raises costs the run that it works for, no other; work in the background

inputs/          what the notebook sent along, brought to this node
runs/            one run, and what belongs to it besides its ranks
ranks/           processes: forked, ordered about, listened to, stopped
watch/           stacks, stalls, use of CPU and GPU, devices
"""
