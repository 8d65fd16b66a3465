from liger_kernel.compat.research_forwards import liger_dyt_bwd, liger_dyt_fwd
from liger_kernel.research.norm import LigerDyTFunction
