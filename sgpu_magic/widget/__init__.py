"""The live view of a run in a notebook: an anywidget that stands below the cell while the run goes on.

live_views        one kernel's: whether a run gets one, and what it needs for it
widget_publisher  opens it after 100 ms, feeds it, replaces it by the run's final form
rank_widgets      the comms of widgets that ranks have made
channels          its questions and their answers, also while the cell blocks the kernel
view_widget       the ipywidget itself
panel_widget      that of the environment panel
keyed_widget      what both are
"""
