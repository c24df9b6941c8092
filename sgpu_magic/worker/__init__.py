"""What runs in the notebook's own Python beside it: the zygote, and the ranks it forks.

standalone  a run again outside the notebook, under torchrun

process/    a rank as a process: forked, taking its place, hearing orders, writing, leaving
cell/       a cell in it: run, shown, described where it failed, what it brings back
group/      its process groups
ray/        the Ray cluster of a run
"""
