"""The kernel families, a sketch a file.

Products are `gemm_*` (`gemm` and `windows` read their operands), attention `attention*`; images
have `stencil`, `resize` and `squeeze` (`pieces` are kernels of several parts), what is reduced is
`rowwise` or `columnwise`, and all else is `elementwise`, or `transpose` where it reads an image
whose channels lie apart.
"""
