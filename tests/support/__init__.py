"""What tests of several folders use. It is on their path: they import `homes`, not `support.homes`.

agent_process         a real agent without a pool service: this process orders runs and hears what becomes of them
bare_pages            a kernel's widget in Chromium with no server and no JupyterLab, which costs a tenth
browsers              notebooks in Debian's Chromium, with a picture of what a person sees
builds                real builders of environments, ordered as an agent orders them
culprits              a culprit that fails when all others wait for it, and not before
executed_notebooks    this project's own notebooks, run from top to bottom in a home of their own
free_ports            ports for servers that are told theirs: none of those that the system gives to connections
front_end             what a browser does with a run's live view, as far as a kernel can tell: the tests' front end
headless_notebooks    notebooks that run without a front end: nbclient's and papermill's
homes                 a pool's directories away from every other, and every process that belongs to it
hostile_exceptions    exceptions that do harm when somebody describes them
importable_functions  functions of a module that ranks can import
installed_venvs       virtual environments with every kind of installation, and the servers that they are installed from
ipykernels            other versions of ipykernel, laid over this environment for one kernel at a time
jupyter_servers       real Jupyter servers in a home, with this tree's extensions, whatever is installed
kernels               real kernels in a home of their own
launches              orders to start a run, as agents get them
lazy_modules          modules that take seconds to import, imported when a test first uses them
listed_pools          served pools in a user's list
live_log              ranks that write logs and say so in events as an agent does
many_agents           a pool of several nodes on this machine: an agent for each, with an address of its own
mlflow_servers        MLflow servers: the real one, its REST application alone, and a gateway that misbehaves
mlflow_stores         MLflow stores that are copies of one that was made once
npm_packages          a copy of the front end's sources with the packages of its lock file
nvml_stub/            a stand-in for NVML's library, for processes that a test starts
odd_messages          messages of a protocol that are well formed and mean nothing, for servers that must bear them
planted_faults        an agent with faults planted in its callbacks
planted_table         the callbacks of the agent in which faults are planted, by what strikes them
pool_client           a real pool with real ranks, asked by this process as a kernel asks it, without a notebook
pool_faults           faults in the pool service: a method that raises once, when the test says so
process_table         what the system tells of processes: the table, their descriptors, threads and listening sockets
ranks                 ranks of a real zygote, spoken to over the wire as the agent does
ray_clusters          Ray clusters: fake nodes of one machine, and raylets with addresses of their own
ray_head              a Ray head as an operator starts it, with a dashboard and token authentication
ray_netns             a Ray cluster whose raylets are in network namespaces, on a bridge; needs root
ray_pool              a pool service with the Ray engine in the foreground
ray_traces            what a run's own Ray cluster leaves on a machine, or does not
scheduler_requests    what the scheduler is given, and what it answers, in the words of its tests
served_pools          pools that are really served on a TCP port, and clients of other machines
server_kernels        kernels of a Jupyter server as a page drives them, and cells that run in them while it looks
shared_homes          homes with a pool and a kernel that the modules of one test process share
simulated_cluster     inventories of many nodes, and a scheduler that hands out their devices
small_disks           a real file system of a few megabytes that a test fills, makes read-only and frees again
small_index           a package index of a test's own: small wheels over HTTP, which may be made to wait
stories               stories of runs, told to a view event by event
story_player          plays a story of `stories` in a kernel's live view, for tests of what a browser makes of it
strangers             who should get nothing of a pool: programs that say what they like to its sockets
strikes               real signals to real processes of a home, and what is looked at afterwards
tcp_proxy             a line between two programs that can be cut, silenced and listened to
tracking_writers      the tracking writer's process without a pool, and what MLflow says of its runs
two_machines          two Pythons with different packages, two state folders, and a network namespace
typed_sample          the public API as a program with types uses it, for pyright
waiting               waiting for a condition with a deadline: no test sleeps
"""
