"""What reproduces the tables and what the shipped models are trained on.

`e2e`, `subgraphs`, `ops`, `resnet` and `ablations` are tables beside every peer (`suites` runs
them), `bench_models`, `op_table` and `kernel_table` tables of gtco's own; `measure_pools`,
`train_ranker` and `refit_constants` make the cost model. `models` has models to run, `studies`
answered a question once, `notes` say what was learned.
"""
