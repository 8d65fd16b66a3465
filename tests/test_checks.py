"""The checks that `make lint` runs find what they are for, and leave alone what is right."""

import check_comments
import check_layers
import pytest

MERGED = [
    "///   the z-loss dx_j = s · (A p_j − α/V w_j / divisor₀) · (1 − (z_j / softcap)²) A =",
    "///   PolicyLoss ℓ ← ℓ · ratio, but for Vespo ℓ ← ℓ + beta · kl, kl = e^(ref_logp − logp) − (ref_logp − logp) − 1",
    "///   x̂ = (x − mean(x)) · rstd, rstd = 1 / sqrt(mean((x − mean(x))²) + eps), over a group of a sample",
    "/// da = (dc · b) · act'(m · a) · m;  db = dc · act(m · a).",
    "/// With r_p = rstd(xᵖ) and S_p = Σ_cols dy · xᵖ:",
    "  float* parts;  // m = max z, s = Σ exp((z − m)/T), t = Σ exp((z − m)/T) (z − m)/T",
    "/// gelu(x) = x/2 · (1 + tanh u) = x · σ(2u), u = √(2/π) (x + 0.044715 x³)",
    "// h = a * b, g = c - d",
]
SINGLE = [
    "///   dx_j = s · (A p_j − α/V w_j / divisor₀ − [j = y] (1 − α) w_y / divisor₀) · (1 − (z_j / softcap)²)",
    "/// The terms of a policy's loss, for logp [batch, tokens]; A = advantages, m = mask.",
    "/// A sum (a = 1 + 2, b = 3 + 4), of `c = 1 + 2, d = 3 + 4` and of kWidth = 8, kBuffers = 1: once.",
    "/// (s = 1) or not (s = −1), where x <= 1 + y and z == 2 + y.",
    "  const float a = b + c, d = e * f;  // g = h + i",
    '  print("// a = b + c, d = e + f");',
]


@pytest.mark.parametrize("line", MERGED)
def test_two_equations_on_a_line_are_found(line):
    assert "two equations" in "".join(check_comments.problems_of("liger/a.h", line))


@pytest.mark.parametrize("line", SINGLE)
def test_one_equation_is_left_alone(line):
    assert not list(check_comments.problems_of("liger/a.h", line))


def test_long_lines_of_cpp_are_found():
    assert not list(check_comments.problems_of("liger/a.h", "// " + "x̂" * 117))
    assert "longer than" in "".join(check_comments.problems_of("liger/a.h", "// " + "x̂" * 118))


@pytest.mark.parametrize("what", ["a float a row", "a bit a pack", "a gradient an argument"])
@pytest.mark.parametrize("name", ["liger/a.h", "python/a.py", "docs/a.md"])
def test_one_per_is_asked_for(name, what):
    assert "per" in "".join(check_comments.problems_of(name, f"Room for {what} here."))
    assert not list(check_comments.problems_of(name, "Room for a float per row; a row and a column."))


def test_the_tree_has_none():
    assert not list(check_comments.problems())


def test_imports_of_the_package(tmp_path):
    """An import from a floor above, by a package's __init__ too, a circle (of imports inside functions too), and a file
    without a floor."""
    package = tmp_path / "liger_kernel"
    for name, text in {
        "utils": "",
        "ops/rope": "from liger_kernel.utils import x\nfrom liger_kernel.ops import norm",
        "ops/norm": "def f():\n    import liger_kernel.ops.rope",
        "memory": "from liger_kernel.ops.norm import y",
        "_memory/__init__": "def __getattr__(name):\n    from liger_kernel.ops import norm",
        "elsewhere": "",
        "research/norm": "from liger_kernel.utils import x",
        "ops/dyt": "from liger_kernel.research.norm import y",
        "ops/__init__": "from liger_kernel.ops import dyt",
        "trl": "def f():\n    import liger_kernel.compat.mhc",
        "compat/mhc": "from liger_kernel.research import norm",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    found = sorted(check_layers.import_problems(tmp_path))
    assert [line.split(":")[0] for line in found] == [
        "a circle of imports",
        "liger_kernel._memory imports liger_kernel.ops.norm, which stands above it",
        "liger_kernel.elsewhere stands on no floor",
        "liger_kernel.memory imports liger_kernel.ops.norm, which stands above it",
        "liger_kernel.ops imports liger_kernel.ops.dyt, which stands above it",
        "liger_kernel.trl imports liger_kernel.compat.mhc, which stands above it",
    ]
    (package / "ops" / "norm.py").write_text("")
    assert not any("circle" in line for line in check_layers.import_problems(tmp_path))


def test_length_of_files(monkeypatch):
    """A long file is named, and only a longer one is a problem."""
    (name, lines), *_ = check_layers.lengths()
    assert (check_layers.ROOT / name).read_text().count("\n") == lines
    monkeypatch.setattr(check_layers, "lengths", lambda: [("a.py", check_layers.LONGEST)])
    assert not list(check_layers.problems())
    monkeypatch.setattr(check_layers, "lengths", lambda: [("a.py", check_layers.LONGEST + 1)])
    assert list(check_layers.problems()) == ["a.py has 601 lines, more than 600"]
