"""The Python API: `@distributed`, `@ray_launch`, run handles and sweeps.

decorator  `@distributed` and `@ray_launch`, and the objects that they return
launch     submits function calls as runs: single calls, and those of a sweep
sweeping   runs a sweep: one run per item
sweep      `map`: one run per item, and its results
compat/    the documented names of serverless_gpu
"""
