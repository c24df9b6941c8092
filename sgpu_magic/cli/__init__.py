"""The `sgpu` command: a module for each command or group of commands has its options and does the work.

__main__        `python -m sgpu_magic.cli`
main            exit codes, and which module has which command
arguments       what the commands' parsers share
runs            `sgpu runs`, `sgpu cancel`, `sgpu detach`, `sgpu stacks`, `sgpu port-forward`
logs            `sgpu logs`
usage           `sgpu usage`, as text, CSV and JSON
copying         `sgpu cp`
replay          `sgpu replay`
sync            `sgpu sync`: what MLflow has not got yet
environments    `sgpu env`
pools           `sgpu pool status`, `stop`, `add`, `list`, `remove`, and `sgpu types`
serving         `sgpu pool serve`, `deploy`, `undeploy`, `keygen`, `authorize`, `revoke`
run             `sgpu run`
jobs            `sgpu jobs`, and the records of what `sgpu run` executes
headless/       a notebook executed without a front end

doctor          `sgpu doctor`: its checks in the order in which a person reads them; settings, directories, pools
python_checks   this Python, its packages, its GPUs, and a real two-rank group
machine_checks  what one check says; what the system offers: memory, limits, names
"""
