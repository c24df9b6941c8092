"""Settings of a process that code sets by calls: dtypes, print options, logging, warnings and others.

A rank takes over the notebook's settings, as it takes over its working directory and environment. Each `SettingGroup`
belongs to a module and reads and sets that module's settings by key. Only modules that the notebook has imported are
read, only values that differ from the defaults are sent, and a rank applies those of a module once it has imported it.

setting_group        the settings of one module: how they are read and set
groups               the groups of all modules
torch_settings       dtypes, devices, precision, determinism and print options of torch
numpy_settings       print options of numpy, and its handling of floating-point errors
pandas_settings      the options of `pandas.set_option`
matplotlib_settings  `rcParams`
json_values          values of options as JSON values
logging_settings     levels of loggers, and handlers that write to the standard streams
warning_filters      the filters of warnings
standard_library     `decimal`, `locale`, `sys`, `gc`, `socket`, `multiprocessing` and `time`
notebook_settings    reads the settings of the notebook's process
rank_settings        applies them to a rank
"""
