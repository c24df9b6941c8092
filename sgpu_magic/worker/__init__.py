"""The worker processes, which run with the notebook's Python interpreter: the zygote, and the ranks that it forks.

standalone  reruns a run outside the notebook, under torchrun

process/    a rank as a process: fork, setup, orders, output, exit
preload/    imports that were executed ahead: in the zygote, hidden until ranks import them
cell/       a cell on a rank: execution, display, failures, results
group/      a rank's process groups
ray/        the run's own Ray cluster
"""
