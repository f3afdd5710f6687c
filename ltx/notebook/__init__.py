"""Notebooks: ``%load_ext ltx``, and cells that run on workers."""

from ltx.notebook.magics import load_ipython_extension as load_ipython_extension
