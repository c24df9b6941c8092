"""Helpers that tests of several folders use. This folder is on their path: they import `homes`, not `support.homes`.

agent_process         a real agent without a pool service: this process sends the orders and receives the events
bare_pages            a kernel's widget in Chromium without a server and JupyterLab, in a tenth of the time
axe_pages             parts of a page as axe-core reads them
browsers              notebooks in Debian's Chromium, with screenshots
builds                real builders of environments, ordered as an agent orders them
culprits              a rank that fails only once all others wait for it
far_sides             a process that unpacks what this one has packed, and a notebook's namespace to pack from
examples              the number of examples that property tests try, in make test and in make test-all
executed_notebooks    this project's own notebooks, executed in a separate home
file_pool             a pool that only takes and sends files, in a thread of this process
free_ports            free ports outside the range that the system assigns to connections, for servers with a given port
front_end             a stand-in for a browser's side of a run's live view, as the kernel sees it
headless_notebooks    notebooks that run without a front end, with nbclient and papermill
homes                 a pool's own directories, and every process that belongs to it
hostile_exceptions    exceptions that do harm when they are described
importable_functions  functions of a module that ranks can import
installed_venvs       virtual environments with every kind of installation, and servers to install from
ipykernels            other versions of ipykernel, in front of this environment's for one kernel at a time
jupyter_servers       real Jupyter servers in a home, with the extensions of this source tree
kept_runs             runs as a pool keeps them: rows of a real ledger and directories, without a pool that answers
kernels               real kernels in their own home
launches              orders to start a run, as agents get them
lasting_ranks         cells whose ranks outlive SIGKILL
lazy_modules          modules that take seconds to import, imported when a test first uses them
listed_pools          served pools in a user's list
live_log              ranks that write logs and report them in events as an agent does
many_agents           a pool of several nodes on this machine: an agent for each, with its own address
mlflow_interpreters   interpreters with a stand-in for the whole package mlflow
mlflow_servers        MLflow servers: the real one, its REST application alone, and a misbehaving gateway
mlflow_stores         MLflow stores, copied from one that was made once
npm_packages          a copy of the front end's sources with the packages of its lock file
nvml_stub/            a stand-in for NVML's library, for processes that a test starts
odd_messages          well-formed messages of a protocol with meaningless content, which servers must tolerate
older_package         a Python environment with an older version of this package, and its upgrade
page_snippets         the examples of README and the site: read, parsed, and compared with what they show
planted_faults        an agent with faults planted in its callbacks
planted_table         the callbacks of the agent in which faults are planted, by what triggers them
nccl_manners          a process-group backend that behaves like NCCL, for code in cells
pool_client           a real pool with real ranks, used by this process as a kernel does, without a notebook
pool_faults           faults in the pool service: a public method that raises once, when the test arms it
preloads              waits until a pool has executed imports ahead
process_table         processes as the system reports them: table, descriptors, threads and listening sockets
ranks                 ranks of a real zygote, controlled over the wire as by an agent
ray_clusters          Ray clusters: fake nodes of one machine, and raylets with their own addresses
ray_head              a Ray head as an operator starts it, with a dashboard and token authentication
ray_jobs_api          an HTTP server that answers as Ray's Jobs API does, with jobs that do what a test says
ray_netns             a Ray cluster whose raylets are in network namespaces, on a bridge; needs root
ray_pool              a pool service with the Ray engine in the foreground
ray_traces            what a run's own Ray cluster leaves behind on a machine
scheduler_requests    requests to the scheduler and its answers, in short forms for its tests
scripted_pools        pools at the other end of a real link, whose replies, events and end a test controls
secret_corpus         secrets of every form, and values that only look like secrets
served_pools          pools served on a TCP port, and clients on other machines
server_kernels        kernels of a Jupyter server driven as by a page, and cells that run in them meanwhile
session_line_client   a notebook's end of a session's line to a real agent
shared_homes          homes with a pool and a kernel that the modules of one test process share
simulated_cluster     inventories of many nodes, and a scheduler that hands out their devices
small_disks           a real file system of a few megabytes that a test fills, makes read-only and frees again
small_index           a test's own package index: small wheels over HTTP, with answers that can be held back
status_rows           a pool's status and its rows of runs, as a pool sends them
ssh_servers           real servers of Debian's OpenSSH on loopback, each with its own keys and the home behind it
stories               sample runs, whose events are applied to a view one by one
story_player          plays a story of `stories` in a kernel's live view, for tests in a browser
strangers             unauthorized programs that send anything to a pool's sockets
strikes               sends signals to real processes of a home, and checks what is left of them
tcp_proxy             a connection between two programs that can be cut, silenced and recorded
tracking_writers      the tracking writer's process without a pool, and MLflow's view of its runs
two_machines          two Pythons with different packages, two state folders, and a network namespace
typed_sample          a typed program that uses the public API, for pyright
time_limits           how long something may take that waits for nothing
waiting               waiting for a condition with a deadline, instead of sleeping
"""
