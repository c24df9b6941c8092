"""The `sgpu` command: `main` parses and prints, a module for each command or group of commands does the work.

__main__        `python -m sgpu_magic.cli`
main            exit codes, and which module does what
parser          every command and its options
runs            `sgpu runs`, `sgpu cancel`, `sgpu detach`, `sgpu stacks`
logs            `sgpu logs`
usage           `sgpu usage`, as text, CSV and JSON
copying         `sgpu cp`
port_forward    `sgpu port-forward`
replay          `sgpu replay`
sync            `sgpu sync`: what MLflow has not got yet
environments    `sgpu env`
pools           `sgpu pool status`, `stop`, `add`, `list`, `remove`, and `sgpu types`
serving         `sgpu pool serve`, `deploy`, `undeploy`, `keygen`, `authorize`, `revoke`
run             `sgpu run`
jobs            `sgpu jobs`, and the records of what `sgpu run` executes
headless/       a notebook executed without a front end

doctor          `sgpu doctor`: its checks in the order in which a person reads them
finding         what one check says
python_checks   this Python, its packages, and a real two-rank group
machine_checks  what the system offers: GPUs, memory, limits, names
place_checks    settings, directories, and the pools, this machine's and others'
"""
