"""Seeded defects, from every package of ltx: what the test suite has to catch."""

from tests.mutants import collectives, comm, gradients, processes, steps, streams, updates

MUTANTS = (
    *collectives.MUTANTS,
    *gradients.MUTANTS,
    *steps.MUTANTS,
    *updates.MUTANTS,
    *comm.MUTANTS,
    *processes.MUTANTS,
    *streams.MUTANTS,
)
