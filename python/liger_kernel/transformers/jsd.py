from liger_kernel.operators.loss import LigerJSD, LigerJSDFunction
