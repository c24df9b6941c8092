"""What the environment panel shows, and what it may ask: for JupyterLab's sidebar and for a widget alike.

picture   records of a pool as a panel draws it
notebook  records of a notebook's kernel: its packages, its session, a plan
messages  questions to the kernel, and its answers
drawing   a pool's status -> picture
waiting   when devices will be free
usage     what a month has used
places    what runs' directories tell
looking   asks a pool once
watcher   asks pools while somebody looks
orders    what a page asks of pools
plan      what applying a choice would do
installing      packages in the kernel's own environment
kernel_picture  a kernel -> picture
desk      the kernel's half: answers questions
door      where they reach it; loads the desk with the first
lanes     the threads that answer
accepting       `%sgpu_env --accept`
panel_view      the panel below a cell; in_text where none can be shown

The Jupyter server imports `picture`, `messages`, and from `drawing` to `orders`. The choice itself is `runs/choice`,
below all that submits.
"""
