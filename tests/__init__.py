"""`unit` and `faults` (planted ones) need no GPU, `gpu` is skipped without one, `fuzz` runs random
models, `golden` holds what must not change unseen; the files here make what several tests use."""
