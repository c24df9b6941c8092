"""Pools on machines that the user can log in to with ssh.

transport    carries a link's messages over such logins
relay        at the far end: starts the machine's pool if needed, and passes messages between it and this side
remove       runs there in its place: removes what logins have left
"""
