"""A rank as a process, from the zygote's fork to its exit.

zygote            imports torch and IPython once, then forks ranks
rank              a rank's main loop: set up, execute orders, exit
helper            the thread that receives messages and handles those that can't wait for the main thread
leaving           what a rank finishes after its cell: threads, exit functions, open files
orphans           processes that the rank's code has detached, beside its own children
rank_context      what a rank takes over before a cell: the kernel's context and results; device; group
user_code         when an interrupt reaches the user's code, and calls of it that must not end the rank
terminal          stdout and stderr at descriptor level, refused keyboard input, and `exit`
position          where the rank is: its stack, readable from outside and after its death, and its collective
patches           changes to other packages in a rank and in the processes that it starts
notebook_classes  classes of the notebook in child processes of a rank
stand_in          CUDA devices that stand for the CPU, on machines without a GPU
cuda_on_cpu       maps cuda to the CPU on a rank without a GPU
cuda_functions    the functions of `torch.cuda` and `torch.accelerator` there
"""
