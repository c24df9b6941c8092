"""`sgpu run`: a notebook executed without a front end, from a shell, cron, Airflow or CI.

job            what is to be run: the command's options and a job file's keys, checked
formats        a notebook from its file: .ipynb, Databricks source, percent, jupytext's; what is a script
parameters     typed values, and the cell that sets them
cells          where the notebook's cells run, and what is put before them
execution      the kernel, cell by cell
executed_copy  the copy of the notebook with its outputs
outcome        how it ended, as an exit code, and what a failed cell shows
"""
