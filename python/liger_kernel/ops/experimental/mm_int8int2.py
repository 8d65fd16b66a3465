from liger_kernel.operators.embedding import matmul, pack_weights, unpack_weights
