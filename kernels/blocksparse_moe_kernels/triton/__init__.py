"""The launchers in Triton, one file an operation. Importing them needs Triton; `blocksparse_moe_kernels` itself does not."""

from __future__ import annotations

from ..versions import require

require("triton", "3.6", "the Triton kernels of blocksparse_moe")
