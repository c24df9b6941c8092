"""Monitors runs and devices.

run_watch     all monitoring of one run; detects idle GPUs and their cause
stack_taking  requests the stacks of a run's ranks
stalls        detects that the ranks of a silent run wait for each other
sampling      samples CPU, memory and GPU usage once a second
gpus          reads the GPUs of runs in threads
nvml          the interface to NVML
inventory     the devices of this node and their use outside the pool
"""
