from liger_kernel.operators.mlp import LigerMLPFunction
