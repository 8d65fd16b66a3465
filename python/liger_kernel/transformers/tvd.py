from liger_kernel.operators.loss import LigerTVDLoss, LigerTVDLossFunction
