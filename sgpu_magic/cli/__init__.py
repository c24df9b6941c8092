"""The `sgpu` command: a module for each command or group of commands has its options and does the work.

__main__        `python -m sgpu_magic.cli`
main            exit codes, which module has which command, what their parsers share
runs            `sgpu runs`, `sgpu usage`, `sgpu cancel`, `sgpu detach`, `sgpu stacks`
forwarding      `sgpu port-forward`
logs            `sgpu logs`
copying         `sgpu cp`
sync            `sgpu sync`: what MLflow has not got yet
environments    `sgpu env`
pools           `sgpu pool status`, `stop`, `add`, `list`, `remove`, and `sgpu types`
serving         `sgpu pool serve`, `deploy`, `undeploy`, `keygen`, `authorize`, `revoke`
run             `sgpu run`, `sgpu replay`
jobs            `sgpu jobs`, and the records of what `sgpu run` executes
headless/       a notebook executed without a front end

doctor          `sgpu doctor`: its checks in the order in which a person reads them; settings, directories, pools
python_checks   this Python, its packages, its GPUs, and a real two-rank group
machine_checks  what one check says; what the system offers: memory, limits, names
"""
