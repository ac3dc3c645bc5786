"""Faults planted in kernels, passes and the tuner's processes: each must be caught."""
