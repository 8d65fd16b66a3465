from liger_kernel.operators.norm import LigerDyT, LigerDyTFunction
