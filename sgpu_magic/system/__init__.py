"""Operating system interfaces: processes, memory, streams between processes, sockets and keys.

processes         prctl, threads and cores, descendants, peers of a socket, the log of a service; available memory
write_tracking    which pages of this process's memory have been written, exactly
child_process     child processes that exchange messages over a socket, restarted when they exit
notify_command    the user's command that is run when a run has ended: the setting `notify`
background_command  a command that ends with the process that started it
serial_threads    threads that run tasks one after the other
message_stream    messages over a Unix socket, with file descriptors; requests that await an answer
byte_stream       one end of a forwarded TCP connection
secure_sockets    keys, and ZeroMQ sockets that admit only their holders
collector         pauses of the garbage collector
process_settings/  dtypes, print options, logging, warnings and other settings that a rank takes over from the notebook
part_stream       messages of several parts over pipes, without blocking
bulk_stream       the same over TLS between two sides that know each other from a secure socket
"""
