from liger_kernel import _lazy
from liger_kernel.operators.experts import LigerFusedMoEFunction, fused_experts

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "BLOCK_M_TOKEN compute_routing_metadata"})
