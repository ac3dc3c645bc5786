"""Tuning: search the programs of a model's tasks on the device, then replay the whole model.

`tuner` is the session, `state` and `result` what it keeps and shows, and `replay` decides between
plans by running them in interleaved rounds. The search itself is in `gtco.cost_model`.
"""
