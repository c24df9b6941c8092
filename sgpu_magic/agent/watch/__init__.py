"""What is watched of runs and devices while they work.

run_watch     everything that looks at one run; which of its GPUs stand idle, and why
stacks        where ranks are, read from their stack files
stack_taking  asks the ranks of a run where they are, and waits
stalls        says when the ranks of a silent run wait for each other
sampling      what ranks and devices use, once a second
gpus          the GPUs of runs, asked in a thread
nvml          all that is known of NVML
inventory     the devices of this node, and who else uses them
"""
