"""Which tests run: those of `make test`, or with LIGER_TESTS=all in the environment those of `make test-all`.

What repeats a check on more cases stands under the marker `full`, and `make test` deselects it:

    @pytest.mark.full()                                         # the whole test
    @pytest.mark.full(when=lambda p: p["backend"] == "other")   # with these parameters

Where a test goes over a list itself, it looks at ALL.
"""

import os

ALL = os.environ.get("LIGER_TESTS") == "all"


def left_out(item):
    """Whether a collected test is one that only `make test-all` runs."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    marks = () if ALL else item.iter_markers("full")
    return any("when" not in mark.kwargs or mark.kwargs["when"](given) for mark in marks)
