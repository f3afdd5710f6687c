"""The demo: a character-level GPT, trained data parallel on text that every CPython ships.

``ltx demo`` starts it; ``torchrun --nproc-per-node 2 -m ltx.demo.train`` does the same.
"""
