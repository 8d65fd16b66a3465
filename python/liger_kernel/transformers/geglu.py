from liger_kernel.operators.activation import LigerGELUMulFunction
from liger_kernel.operators.mlp import LigerGEGLUMLP, LigerGEGLUMLPForGemma4

__all__ = ["LigerGEGLUMLP", "LigerGEGLUMLPForGemma4"]
