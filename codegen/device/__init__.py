"""The tile library that generated code includes: CUDA C++ headers, and nothing but.

`ptx` and `wgmma` name the instructions and are the only ones with assembly; `vector`, `math`, `mma`
and `softmax` compute in registers, `ring` and `windows` fill shared memory, `epilogue` stores; each
`gemm_*`, `attention*`, `rowwise`, ... is the template of a sketch.
"""
