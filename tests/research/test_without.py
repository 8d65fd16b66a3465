"""What stands without the wings: nothing imports them before somebody asks for a name, and where libliger has no
research operators (LIGER_RESEARCH=OFF), that is one clear error. `make test-without-research` runs it with such a
library."""

import subprocess
import sys

#: Without the operators, whichever library is loaded.
CODE = """
import sys
from liger_kernel import _library
_library.RESEARCH = False
import liger_kernel.chunked_loss, liger_kernel.ops, liger_kernel.transformers, liger_kernel.trl
import liger_kernel.transformers.monkey_patch
from liger_kernel.transformers.functional import liger_rms_norm

print([name for name in sys.modules if "liger" in name and {"research", "compat"} & {*name.split(".")}])
for ask in (
    lambda: liger_kernel.transformers.LigerDyT,
    lambda: liger_kernel.transformers.functional.liger_sparsemax,
    lambda: liger_kernel.ops.LigerMHCPreFunction,
    lambda: liger_kernel.ops.group_norm_forward,
):
    try:
        ask()
    except ImportError as error:
        print(error)
from liger_kernel.ops import rms_norm_forward  # what only other people's code needs is there
from liger_kernel import functional
print("done")
"""
SAID = "this libliger has no research operators: it was built with LIGER_RESEARCH=OFF"


def test_without_research_operators():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", *[SAID] * 4, "done"], done.stderr
