"""One agent per node: starts ranks, takes their output, finds the root cause, ends them. Lives across runs.

service         what the pool says, and to whom it goes
stream          messages over socketpairs, descriptors beside
zygotes         the processes that fork ranks, one per environment
group           N ranks, from the fork to the exit
execution       one run in one group, from the launch to the last exit
output          pipes -> log and batches
gathering       what the ranks reported
root_cause      which failure is to blame (pure)
stop_path       interrupt, release, TERM, grace, KILL
release         frees ranks that sit in a collective
leftovers       what a run's processes left behind
run_directory   what a run leaves on disk
run_memory      payload and results in memory; keeper copies them to disk in the background
inventory       the devices; device_users who uses them; nvml all that is known of NVML
faults          what a callback raises costs the run that it works for, no other
sampling        samples all runs every second: process_use from /proc, gpus from NVML (in a thread, gpu_reading)
run_watch       what is watched of one run: run_sampler, idle_gpus (idle_watch is pure), stall_watch (progress)
"""
