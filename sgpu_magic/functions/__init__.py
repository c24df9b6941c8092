"""The Python API: `@distributed`, `@ray_launch`, run handles and sweeps.

decorator   `@distributed` and `@ray_launch`, and the objects that they return
launch      submits a function call as a run
sweep       `map`: one run per item, and its results
sweeping    submits the runs of a sweep and collects their results
compat/     the documented names of serverless_gpu
"""
