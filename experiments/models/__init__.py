"""Models to compile and time: each function returns `(module, args)`, as `gtco bench` takes it."""
