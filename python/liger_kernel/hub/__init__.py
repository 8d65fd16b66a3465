"""Layers for Hugging Face's `kernels`: the forwards that `liger_kernel.transformers.use_as_hub_kernels` puts under
`use_kernels=True`.

The folder is also a local kernel, `kernels.get_local_kernel(pathlib.Path(liger_kernel.hub.__path__[0]))`. It holds no
library of its own: its layers run on the installed one.
"""

from . import layers
