"""The registered ops, `torch.ops.blocksparse_moe`: flat tensors in and out, each with a fake implementation and autograd.

They pass through torch.compile whole. `blocksparse_moe.ops` is the way to call them.
"""

from __future__ import annotations

from . import experts, gate, mxfp8, products, recompute, route

__all__ = ["experts", "gate", "mxfp8", "products", "recompute", "route"]
