"""A run as the process that has submitted it sees it: submitted, followed to its end, delivered. No magics here.

workplace           this process's pools, views and settings, one for its magics and its Python functions
notebook            what the kernel knows of its notebook and cell, sentences below the cell that ran last, its restart
packages            this process's packages, reported to the pool
environment_locks   lock files of environments
environment_report  what `%sgpu_env` shows
pools_status        several pools in one view
submit/             a cell or call on its way to a pool
follow/             a run's events to its end, and its results
sessions/           ranks that stay between cells
choice/             the notebook's own choice of devices and packages
replay/             a recorded run launched again
"""
