from liger_kernel.research.norm import LigerGroupNorm, LigerGroupNormFunction
