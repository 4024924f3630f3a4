"""Hugging Face transformers: the experts of a model computed by this package, weights where they are.

transformers dispatches the forward of a decorated experts module by the name in its config
(`transformers.integrations.moe.ExpertsInterface`). `register_huggingface` makes the name "blocksparse" legal there;
`patch_huggingface` switches an existing model. Routers, parameters, their names and `module.forward` stay untouched, so
checkpoints, auxiliary losses and hooks keep working.

    experts.py      what an experts module of the interface computes, and its forward here
    adapters.py     models that have no such module
    patch.py        switching a model, and back
    families.py     which models there are for
"""

from __future__ import annotations

from .experts import UnsupportedModelError
from .families import Support, all_supports, markdown, supports
from .patch import NAME, PatchedLayer, PatchHandle, patch_huggingface, register_huggingface, unpatch_huggingface

__all__ = [
    "NAME",
    "PatchHandle",
    "PatchedLayer",
    "Support",
    "UnsupportedModelError",
    "all_supports",
    "markdown",
    "patch_huggingface",
    "register_huggingface",
    "supports",
    "unpatch_huggingface",
]
