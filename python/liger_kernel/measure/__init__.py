"""Training speed and memory of a model on this machine, plain and with this library: `python -m liger_kernel.measure`.

Nothing here imports the rest of the package by its full name before an arm needs it: in the process of another package
of this name, apart.py provides these modules alone.
"""
