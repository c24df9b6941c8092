"""A library in the notebook's kernel and in the `sgpu` command: reaches a pool, submits, follows. Never schedules.

local_pool    finds the local pool or starts it
connection    the one link of a kernel: made when needed, made again when the pool died
link          the socket's one thread; replies and events to whoever waits
pool          what one can ask of a pool
submitter     hands runs over to it, and to its successor
run           the handle of a submitted run
result        what a finished run returns
interpreter   the kernel's Python, as the ranks' zygote is keyed
current_settings  settings that follow `%env`
uploads       where a payload's bytes lie while they are shipped
"""
