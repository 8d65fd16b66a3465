from liger_kernel import _lazy
from liger_kernel.operators.rope import LigerQwen2VLMRopeFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "qwen2vl_mrope_backward qwen2vl_mrope_forward"})
