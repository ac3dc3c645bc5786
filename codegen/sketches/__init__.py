"""The kernel families, a sketch a file.

Products are `gemm_*` (`gemm` and `windows` read their operands), attention `attention*`; images
have `stencil`, `resize` and `squeeze` (`pieces` are kernels of several parts), and all else is
`rowwise` or `elementwise`.
"""
