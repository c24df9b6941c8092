"""A rank as a process, from the zygote's fork to its exit.

zygote            imports torch and IPython once, forks
rank              one rank's life: take its place, obey orders, leave
helper            the thread that receives the orders, and does what can't wait
rank_context      what it has taken over: the kernel's place, its device, its group
interrupts        when it hears them
terminal          what it has in place of one: stdout and stderr at descriptor level, no keyboard, and exit
trace             its stack, for those outside and for after its death
notebook_classes  the notebook's classes in its child processes
"""
