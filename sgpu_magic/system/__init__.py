"""What this package needs of the operating system: processes, memory, streams between processes, sockets and keys.

processes       prctl, threads and cores, descendants, peers of a socket
child_process   programs that speak over a socket, started again when they end
message_stream  messages over a Unix socket, with descriptors beside them; requests that wait for an answer
byte_stream     one end of a forwarded TCP connection
secure_sockets  keys, and ZeroMQ sockets that only their holders can use
byte_sizes      what files take, how it is written, how much memory can be taken
"""
