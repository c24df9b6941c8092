"""A run as the process that has submitted it sees it: submitted, followed to its end, delivered. No magics here.

workplace   this process's pool, views and settings: one for its magics and its Python functions
calls       a function's call -> what is submitted
submission  what is submitted, and the handing over
follow      a run's events, to its end
following   one thread for all runs that a program follows while it does something else
outcome     a run that has ended -> names, result or exception
restarts    detaches runs when their kernel is restarted
windows     runs shown while nobody waits for them
notices     what the pool wants to be known
"""
