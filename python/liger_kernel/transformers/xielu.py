from liger_kernel.operators.activation import LigerXIELU
