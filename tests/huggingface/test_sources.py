"""Fingerprints of sources, by which a part is found."""

import importlib
import textwrap

from liger_kernel.transformers.patching.formulas import fingerprint


def test_a_fingerprint_is_of_what_runs(tmp_path, monkeypatch):
    """Comments, docstrings, decorators, annotations and line breaks do not count; a called function does."""
    sources = {
        "first": """
            def half(x): return x / 2

            def part(x, y=1):
                return half(x) + y
            """,
        "same": """
            import functools

            def half(x): return x / 2  # exactly

            @functools.cache
            def part(x: "list[int]", y: int = 1) -> float:
                '''Something.'''
                # and this
                return half(
                    x) + y
            """,
        "other_call": """
            def half(x): return x / 3

            def part(x, y=1):
                return half(x) + y
            """,
        "other_default": """
            def half(x): return x / 2

            def part(x, y=2):
                return half(x) + y
            """,
        "other_block": """
            def half(x): return x / 2

            def part(x, y=1):
                if x:
                    return half(x) + y
            """,
    }
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for name, source in sources.items():
        (tmp_path / f"fingerprint_{name}.py").write_text(textwrap.dedent(source))
        found[name] = fingerprint(importlib.import_module(f"fingerprint_{name}").part)
    assert found.pop("first") == found.pop("same")
    assert len({*found.values()}) == 3 and None not in found.values()
