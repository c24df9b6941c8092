"""One agent per node: starts ranks, takes their output, finds the root cause, ends them. Lives across runs.

service         what the pool says, and to whom it goes
reports         what the agent says, numbered by run and kept until it is written down
run_registry    the runs that it holds
launches        from a launch to its ranks; first, where need be, come
fetch_inputs    what the pool's store has of it: blob_cache, code_bundles, uploaded (kept_folders is how they are kept)
environments    the packages, built by building's process
node_context    the kernel's place, in terms of what is here
faults          what a callback raises costs the run that it works for, no other
service_socket  where the next pool service finds it; agent_ready  what it is told first
orphaned        the time without a service;  successor  starts the next one
background_call threads that nobody waits for

runs/           one run, and what belongs to it besides its ranks
ranks/          processes: forked, ordered about, listened to, stopped
failures/       what went wrong, and which of several failures is to blame
watch/          stacks, stalls, use of CPU and GPU, devices
"""
