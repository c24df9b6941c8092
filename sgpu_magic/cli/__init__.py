"""The `sgpu` command: `main` parses and prints, a module for each group of commands does the work.

main             the parser, exit codes, and which module does what
*_options        the parsers of larger commands
runs             `sgpu runs`, `sgpu cancel`, `sgpu detach`, `sgpu stacks`
logs             `sgpu logs`
usage_forms      `sgpu usage`, as text, CSV and JSON
copying          `sgpu cp`
port_forward     `sgpu port-forward`
replay           `sgpu replay`
sync             `sgpu sync`: what MLflow has not got yet
environments     `sgpu env`
pool             `sgpu pool status`, `sgpu pool stop`
pools            `sgpu pool add`, `list`, `remove`, `sgpu types`
serving          `sgpu pool serve`, `authorize`, `revoke`
deploying        `sgpu pool deploy` on Ray;  deployed  what the Ray job runs
run              `sgpu run`;  jobs  `sgpu jobs`;  headless/  how a notebook runs without a front end

doctor           `sgpu doctor`
finding          what one of its checks says
python_checks    this Python, its packages, and a real two-rank group
machine_checks   what the system offers: GPUs, memory, limits, names
place_checks     settings, directories, and the pool that lives in them
pools_checks     the pools that are listed, and this user's key
"""
