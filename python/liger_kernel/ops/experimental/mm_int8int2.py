from liger_kernel.research.int2 import matmul, pack_weights, unpack_weights
