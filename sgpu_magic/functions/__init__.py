"""The same from Python: `@distributed`, `@ray_launch`, the handle of a run, a sweep over items.

decorator   `@distributed` and `@ray_launch`, and what stands in a function's place
launch      a call becomes a run that a pool has taken
handle      `Run`: a run that goes on while the program does something else, and what a caller sees of an exception
sweep       `map`: one run per item, and what comes of it
sweeping    a sweep that goes on
compat/     the documented names of serverless_gpu
"""
