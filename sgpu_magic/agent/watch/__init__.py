"""What is watched of runs and devices while they work.

run_watch      everything that looks at one run
stacks         where ranks are, read from their stack files;  stack_taking  asks them and waits
stalls         says when the ranks of a silent run wait for each other;  stall_rules  decides it (pure)
sampling       every run once a second;  run_sampler  one run's samples;  usage  CPU and memory, from /proc
gpus           the GPUs of runs, asked in a thread;  gpu_reading  one GPU's moment;  nvml  all that is known of NVML
idle_gpus      tells of idle GPUs;  idle  which ones they are (pure)
inventory      the devices of this node;  device_users  who else uses them
"""
