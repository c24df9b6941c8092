"""What the environment panel shows, and what it may ask: for JupyterLab's sidebar and for a widget alike.

Of pools:

schema           what a panel draws, as JSON
messages         questions and orders, and what is told and answered
pool_state       a pool's status -> what is drawn of it
device_rows      its devices, and when more of them will be free
past_runs        where runs' files are, and what a month has used
poll_pool        asks a pool once, or all of the list
watch            asks pools while somebody looks
orders           what a page asks of pools

Of a notebook's kernel:

kernel_state     a kernel -> what is drawn of it, also as text
plan             what applying a choice would do
kernel_actions   answers questions: plans, applies, connects; `%sgpu_env --accept`
kernel_endpoint  where questions reach the kernel, and the threads that answer
panel_view       the panel below a cell

The Jupyter server imports the first half. The choice itself is `runs/choice`, below all that submits.
"""
