"""The agent, one process per node: starts ranks, captures their output, finds root causes, stops ranks.

An agent outlives the runs that it executes.

__main__        the process's entry point: connects to its pool, then runs `service`
service         dispatches the pool's messages
survive         survives restarts of the pool service: announces itself, waits for the next service, accepts it
agent_socket    sockets on which a restarted pool service and notebooks with sessions are accepted
session_lines   cells that notebooks send to their sessions without the pool service
reports         events for the pool, kept until it confirms that they are on disk; requests for files at the pool
run_registry    the runs that the agent holds
launch          turns a launch into ranks: those of a standby group, or new ones; prepares inputs first
standby_groups  groups of ranks that have started before a run needs them
preloaded_zygotes  zygotes that have executed what runs import
node_context    the kernel's context on this node: directory, path, variables, and its local code
blobs           fetches blobs from the pool's store, and assembles uploaded folders and files from them
environments    the environments that runs need, and the processes that build them
failures        failures and exits of ranks, redaction of secrets, and the root cause
rank_deaths     how a rank died that exited without a report
memory_watch    kills by the kernel's out-of-memory killer, and the peak memory of processes
native_aborts   what torch's C++ code writes before it aborts a rank because of a collective
faults          limits an exception in a callback to the run it serves; background work
timers          timers for work that can wait

runs/           runs and sessions: their cells, files, events and ends
ranks/          rank processes: forking, orders, messages, stopping
watch/          stacks, stalls, CPU and GPU usage, devices
"""
