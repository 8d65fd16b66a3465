from liger_kernel.research.norm import LigerPolyNorm, LigerPolyNormFunction
