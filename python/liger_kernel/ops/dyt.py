from liger_kernel._compat import liger_dyt_bwd, liger_dyt_fwd
from liger_kernel.operators.norm import LigerDyTFunction
