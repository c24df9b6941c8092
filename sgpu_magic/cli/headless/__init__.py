"""`sgpu run`: a notebook executed without a front end, from a shell, cron, Airflow or CI.

job        what is to be run: the command's options and a job file's keys, checked; parameters
formats    a notebook from its file: .ipynb, Databricks source, percent, jupytext's; what is a script
execution  the kernel, cell by cell
outcome    what is put before the cells; the exit code, the executed copy
"""
