from liger_kernel._compat import rms_norm_backward, rms_norm_forward
from liger_kernel.operators.norm import LigerRMSNormFunction, casting_code, check_width
