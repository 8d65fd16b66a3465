from liger_kernel.research.norm import LigerDyT, LigerDyTFunction
