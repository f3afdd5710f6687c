"""Tests on a GPU, run by ``make gpu``: worlds of one rank over NCCL, and two processes that share the GPU over gloo.

Without a CUDA device nothing here is collected. ``LTX_TEST_DEVICE=cpu python -m pytest tests/gpu`` runs on the CPU what
needs no CUDA: the same steps over a backend that orders streams (:mod:`tests.streams.backend`), to check the tests'
own logic.

The process of pytest leaves the GPU alone: what uses it runs in workers.
"""
