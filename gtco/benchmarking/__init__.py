"""gtco beside its peers: answers first, then times in alternating rounds.

`answers` holds the inputs and references, `contestants` who takes part (ONNX Runtime in
`onnx_peer`, TensorRT in `tensorrt_peer`), `rounds` the times, `bench` all of it; `bench_artifact`
does the same for a saved artifact, `compare` finds which group computes something else than the
model.
"""
