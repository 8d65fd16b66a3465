from liger_kernel.operators.loss import LigerKLDIVLoss
