"""What users reported: a file a kind, each situation with a right value that comes from elsewhere.

On two real ranks, on simulated ranks and in a world of one, where these apply. The right values come from plain torch,
from one process on the whole batch, from finite differences or from JAX's rules, never from ltx.
"""
