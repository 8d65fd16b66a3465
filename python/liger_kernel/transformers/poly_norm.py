from liger_kernel.operators.norm import LigerPolyNorm, LigerPolyNormFunction
