"""gtco beside its peers: answers first, then times in alternating rounds.

`answers` holds the inputs and references, `bench` the peers and rounds, `bench_artifact` does the
same for a saved artifact, `compare` finds which group computes something else than the model.
"""
