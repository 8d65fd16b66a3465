from liger_kernel._compat import jsd_backward, jsd_forward
from liger_kernel.operators.loss import LigerJSDFunction
