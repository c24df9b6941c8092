"""The names that a Databricks notebook has without defining them, for the extension `sgpu_magic.compat`.

names            puts `dbutils` and the other names and magics into a shell, and removes them
utility          base class of `dbutils` and its parts
widgets          `dbutils.widgets`
file_system      `dbutils.fs` and `%fs`
secret_values    `dbutils.secrets`
restart          `dbutils.library.restartPython()` and `%restart_python`
other_notebooks  `dbutils.notebook` and `%run` of another notebook
spark            `spark` and `%sql`
html_display     `displayHTML`

The shell is the one that the extension receives; nothing here imports IPython.
"""
