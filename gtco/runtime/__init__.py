"""From a plan to a module that runs: compiled kernels, buffers, and one CUDA graph.

`plan` says what is launched, `cubin` and `host` compile it, `arena` places buffers, `executable`
runs it, `module` is what the user holds, and `artifact` keeps it in a file.
"""
