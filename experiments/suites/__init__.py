"""Tables of models beside every peer, a row each, that go on where they stopped.

`row` is what a row is, `run` the command of a table, `child` the process of a row, `card` what the
GPU did meanwhile, `table` and `plots` what people look at. The tables are `experiments.e2e`,
`experiments.subgraphs`, `experiments.ops` and `experiments.resnet`.
"""
