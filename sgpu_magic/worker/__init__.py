"""What runs in the notebook's own Python beside it: the zygote, and the ranks it forks.

zygote      imports torch and IPython once, forks
rank        one rank's life: join, execute, report, wait, leave
rendezvous  the process group, before and again
place       the kernel's directory, path, environment and devices
shell       IPython in the rank
execute     one cell, its result or its failure
output      stdout and stderr at descriptor level
trace       its stack, for those outside and for after its death
flight_recorder   the collective that it is in
"""
