"""Monitors runs and devices.

run_watch     all monitoring of one run; detects that the ranks of a silent run wait for each other
stack_taking  requests the stacks of a run's ranks
sampling      samples CPU, memory and GPU usage once a second
shared_pages  counts pages that a rank shares with its children once
gpus          reads the GPUs of runs in threads; detects idle ones and their cause
nvml          the interface to NVML, and the readings of a GPU
inventory     the devices of this node and their use outside the pool
"""
