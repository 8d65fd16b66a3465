"""What liger_kernel.batch_invariant is made of."""
