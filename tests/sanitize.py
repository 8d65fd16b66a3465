"""Runs every CUDA kernel once on small inputs, and nothing else, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py

and likewise with racecheck and initcheck, as `make sanitize` does. Without torch's cache of memory a tensor is an
allocation, past whose end nothing may be touched. Arguments name operators to be left out: initcheck does not see what
cuBLAS writes by bulk copies, and takes those with GEMMs.
"""

import sys

import torch
from cases import all_cases

for case in [case for name, case in all_cases().items() if name not in sys.argv[1:]]:
    # The shortest rows, of which the last ones end together with the memory; rows that begin anywhere, and rows over a
    # block's or a cluster's worth, which begin anywhere or not.
    shapes = (
        case.shapes[:1]
        + [s for s in case.shapes if torch.Size(s).numel() < 5000][-2:]
        + [s for s in case.shapes if s[-1] % 8][-1:]
        + case.shapes[-1:]
    )
    for shape in shapes:
        for dtype in case.dtypes[:2]:
            inputs = case.inputs(shape, case.options[0], dtype, "cuda")
            out = case.op(*inputs, **case.options[0])
            out = out if isinstance(out, tuple) else (out,)
            if case.differentiable:
                out = [o for o in out if o.requires_grad]
                torch.autograd.backward(out, [torch.ones_like(o, device="cpu").to("cuda") for o in out])
    torch.cuda.synchronize()
    print(case.name, flush=True)
