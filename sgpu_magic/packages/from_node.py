"""Which distributions a node brings itself."""

from __future__ import annotations

import re

from sgpu_magic.packages.distributions import normalised

SGPU_MAGIC = "sgpu-magic"
_TORCH_FAMILY = re.compile(
    r"(torch|torchvision|torchaudio|triton|pytorch-triton.*|triton-rocm|nvidia-(?!ml-py).*|cuda-(toolkit|bindings|pathfinder))"
)


def is_from_node(name: str, *, torch_mine: bool = False) -> bool:
    """Whether a node's base layer has it, or what takes its place there, and nobody ships it.

    A laptop's torch is built for its CPU, or for another CUDA than the node's driver knows. sgpu-magic has to be the
    one that the node's agent runs.

    Args:
        name: In any spelling.
        torch_mine: `--torch mine`: torch, and what it is made of, is shipped as the notebook has it.
    """
    key = normalised(name)
    return key == SGPU_MAGIC or (not torch_mine and _TORCH_FAMILY.fullmatch(key) is not None)
