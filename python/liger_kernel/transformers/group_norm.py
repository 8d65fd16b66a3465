from liger_kernel.operators.norm import LigerGroupNorm
