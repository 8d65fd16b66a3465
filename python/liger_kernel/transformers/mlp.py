from liger_kernel.operators.mlp import LigerFalconH1MLP, LigerMLP, LigerMLPFunction, LigerUngatedMLP
