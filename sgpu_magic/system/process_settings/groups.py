"""The groups of all modules whose settings ranks take over.

Importing this module imports none of these modules.
"""

from __future__ import annotations

from sgpu_magic.system.process_settings.logging_settings import Logging
from sgpu_magic.system.process_settings.matplotlib_settings import Matplotlib
from sgpu_magic.system.process_settings.numpy_settings import Numpy
from sgpu_magic.system.process_settings.pandas_settings import Pandas
from sgpu_magic.system.process_settings.setting_group import SettingGroup
from sgpu_magic.system.process_settings.standard_library import STANDARD_LIBRARY
from sgpu_magic.system.process_settings.torch_settings import TORCH
from sgpu_magic.system.process_settings.warning_filters import Warnings

GROUPS: tuple[SettingGroup, ...] = (TORCH, Numpy(), Pandas(), Matplotlib(), Logging(), Warnings(), *STANDARD_LIBRARY)
