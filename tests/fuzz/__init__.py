"""Random models, and torch's own operator samples, against eager: `python -m tests.fuzz --help`."""
