"""Logging in to machines with the user's ssh, with nothing installed there before.

address      `ssh://user@host:port`, and the command that logs in
config_hosts  the hosts that the user's ssh configuration names, as suggestions
machines     the machine of a pool, and several machines of one
package      this package as an archive, for the other machine
find_python.sh  runs there first: finds a Python with torch
prepare      runs there next, with that Python's standard library only: unpacks the package, installs what it lacks
far_end      the lines by which a program of this package, which runs there then, tells this side what it does
login        this side of these steps, until that program is ready or done
failures     why a login failed, from what ssh and the other machine wrote

Standard input and output of one remote process carry everything: no port is opened, and none is forwarded.
"""
