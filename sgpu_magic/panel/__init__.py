"""The environment panel's state and requests, the same for JupyterLab's sidebar and for the widget below a cell.

Pools:

schema           what a panel shows, as JSON
pool_state       a pool's status -> what a panel shows of it
device_rows      a pool's devices, and an estimate of when more of them will be free
past_runs        where runs' files are, and this month's usage
poll_pool        polls one pool, or every pool of the list
poller           polls pools while a page shows them
orders           the commands that a page sends to pools, and what carries them out

The notebook's kernel:

kernel_state     requests and replies; a kernel -> what a panel shows of it, also as text
plan             what applying a choice would do
format_plan      a plan as sentences
variables        the variables on the ranks of the current session
kernel_actions   answers requests: plan, apply, connect; `%sgpu_env --accept`
kernel_endpoint  where requests reach the kernel, also from the panel below a cell, and the threads that answer them

The Jupyter server imports the first half. The choice itself is in `runs/choice`, below everything that submits runs.
"""
