"""Measurements that answered a question once; `experiments/notes` says what was learned."""
