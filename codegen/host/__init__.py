"""The device library for a CPU: the same names, each instruction with its meaning."""
