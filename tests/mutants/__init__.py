"""Seeded defects, from every package of ltx: what the test suite has to catch."""

from tests.mutants import collectives, gradients, processes, steps, updates, wire

MUTANTS = (
    *collectives.MUTANTS,
    *gradients.MUTANTS,
    *steps.MUTANTS,
    *updates.MUTANTS,
    *wire.MUTANTS,
    *processes.MUTANTS,
)
