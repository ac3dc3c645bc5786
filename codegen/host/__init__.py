"""The device library for a CPU: the same names, each instruction with its meaning.

A kernel includes `ptx.cuh` and `wgmma.cuh` of this folder in place of the device's, `functions.h`
for libm, and no header of the system. `instructions.h` has the calls to the machine that runs it:

    machine.cc    clusters of fibers under a seeded schedule, meetings, the launch
    memory.cc     each load and store: bounds, dependent launch; in place of the sanitizer's library
    shadow.cc     who wrote each byte and who read it since, and whether a barrier orders them
    copies.cc     barriers, mbarriers, cp.async, the copy engine, clusters
    products.cc   what a warp does together: shuffles, ldmatrix, mma.sync, wgmma
"""
