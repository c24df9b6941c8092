"""Following a run to its end, in the process that submitted it or attached to it.

run_loop      processes and shows events until a run ends, across restarts of its pool service: of one run or many
outcome       shows a run until it ends and delivers names, a result or an exception; interrupted cells
run_notifier  runs the user's command of the setting `notify` when a long run ends
"""
