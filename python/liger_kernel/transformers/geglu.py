from liger_kernel.operators.mlp import LigerGEGLUMLP, LigerGEGLUMLPForGemma4
