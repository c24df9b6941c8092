"""Following a run to its end, in the process that submitted it or attached to it.

run_loop    processes and shows a run's events until it ends, across restarts of its pool service
outcome     shows a run until it ends and delivers names, a result or an exception; interrupted cells
background  follows runs in the background of a program, and views whose cell has finished
"""
