"""From a user's model to a graph.

`torch_export` captures modules, and `lowering` with its neighbours turns ATen calls into operators;
`onnx` turns a file into such a module first. Whoever cannot be captured is refused by name.
"""
