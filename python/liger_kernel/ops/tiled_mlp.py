from liger_kernel.operators.mlp import LigerTiledMLPFunction, apply_tiled_mlp, shards_of
