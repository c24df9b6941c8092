"""What runs in the notebook's own Python beside it: the zygote, and the ranks it forks.

zygote      imports torch and IPython once, forks
rank        one rank's life: take its place, obey orders, leave
helper      the thread that receives the orders, and does what can't wait
interrupts  when a rank hears them
standing    what it has taken over: the kernel's place, its device, its group
place       the kernel's directory, path, environment and devices
rendezvous  the process group, before and again
renewal     groups that go on after their connections were lost
broken_models     DDP and FSDP models whose iteration was cut off
shell       IPython in the rank
cell_run    one order to execute: prepare, run, tell
execute     the cell itself, and how it failed
results     what it brings back, and the names that cells have set
asking      the user's objects about themselves, whatever their classes do
failures    an exception described, and let go of
memory      what held it when there was none left
edited_modules    the user's own modules, edited since their import
questions   completion and inspection while no cell runs
widgets     what widgets say and hear
widget_outputs    blocks whose output goes into a widget
output      stdout and stderr at descriptor level
trace       its stack, for those outside and for after its death
flight_recorder   the collective that it is in
"""
