"""What liger_kernel.routing is made of."""
