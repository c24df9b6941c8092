"""Pools on machines that the user can log in to with ssh, with nothing installed there before.

address      `ssh://user@host:port`, and the command that logs in
package      this package as an archive, for the other machine
find_python.sh  runs there first: finds a Python with torch
prepare      runs there next, with that Python's standard library only: unpacks the package, installs what it lacks
relay        runs there then: starts the machine's pool if needed, and passes messages between it and this side
login        this side of these steps, until the relay is ready
failures     why a login failed, from what ssh and the other machine wrote
transport    carries a link's messages over such logins

Standard input and output of one remote process carry everything: no port is opened, and none is forwarded.
"""
