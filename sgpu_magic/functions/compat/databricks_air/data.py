"""`databricks.air.data`: the names of `serverless_gpu.data`."""

from __future__ import annotations

from sgpu_magic.functions.compat.serverless_gpu.data import (
    Checkpointable,
    DataLoader,
    UCVolumeDataset,
    UCVolumeReader,
    UCVolumeWriter,
)

__all__ = ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]
