"""A run followed to its end by the process that submitted it or attached to it.

run_loop    folds a run's events and shows them until it ends, whatever becomes of its pool service
outcome     a run is shown to its end, and becomes names, a result or an exception; interrupted cells
background  runs followed while the program does something else, and views whose cell is over
"""
