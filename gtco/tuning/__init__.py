"""Tuning: search the programs of a model's tasks on the device, then replay the whole model.

`tuner` is the session, `measuring` what it runs of the tasks' programs, `state` and `result` what
both keep and show, and `replay` decides between plans by running them in interleaved rounds. The
search itself is in `gtco.cost_model`.
"""
