"""The operators in Python, one file per family: Functions, functions and modules stand together.

The public names are those of liger_kernel.ops and liger_kernel.transformers, which import them from here. Nothing here
imports those two packages.
"""
