"""The wire: what the client, the pool service, the agent, the zygote and the ranks say to each other.

Typed, frozen records and their codec. No socket, clock or thread here.
"""
