"""What only other people's code needs. Nothing else in this package imports it: others find the names in
liger_kernel.ops, liger_kernel.transformers and the like, which import them when they are asked for one.

Two more files are for others and stand where they replace or load them: ops/fused_linear_cross_entropy.py, whose two
functions they replace, and ops/fused_linear_scaled_cross_entropy.py, which they load by its path.
"""
