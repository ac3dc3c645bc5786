"""Kernels that experiments bring along compile against today's device library."""

from __future__ import annotations

from experiments.studies import fill_rate, shared_reads
from gtco.runtime.compile_pool import CompileJob, compile_many
from gtco.runtime.cubin import CompiledKernel


def test_kernels_of_experiments_compile() -> None:
    programs = (
        fill_rate.fill_program(fill_rate.QKV, 4),
        fill_rate.fill_program(fill_rate.Fill(64, 72, 36, 3, bulk=1, multicast=2), 4),
        fill_rate.boundary_program(1, 0, 1),
        shared_reads.prepare(1),
        shared_reads.read(shared_reads.STYLES["two share P"]),
    )
    jobs = [CompileJob(each.code, each.name, each.arch) for each in programs]
    outcomes = compile_many(jobs, workers=1)
    errors = [str(each) for each in outcomes if not isinstance(each, CompiledKernel)]
    assert not errors
