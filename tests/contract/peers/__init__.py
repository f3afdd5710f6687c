"""What the tests of Horovod, torch, Bagua, JAX and Lightning find, asked of ltx.

One file for each. It has the cases of their public test suites, written anew: their inputs in kind, their reference
formulas in plain torch or NumPy, and what they refuse. How a case runs on several ranks is in ``cases.py``. What a
peer's suite has and ltx can't say is listed, with the reason, at the top of its file.
"""
