"""gtco: a graph-level fusion compiler with an autotuner for vision models on GPUs."""
