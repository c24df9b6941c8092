"""Operating system interfaces: processes, memory, streams between processes, sockets and keys.

processes       prctl, threads and cores, descendants, peers of a socket, the log of a service; available memory
child_process   child processes that exchange messages over a socket, restarted when they exit; a thread for file I/O
message_stream  messages over a Unix socket, with file descriptors; requests that await an answer
byte_stream     one end of a forwarded TCP connection
secure_sockets  keys, and ZeroMQ sockets that admit only their holders
bulk_stream     messages over TLS between two sides that know each other from a secure socket
"""
