from liger_kernel._compat import rope_backward, rope_forward
from liger_kernel.operators.rope import LigerRopeFunction, heads_swapped, rotated
