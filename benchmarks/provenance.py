"""Of which card, date, commit and versions a file of benchmarks/results is.

A result names the commit that was measured. For older ones, which do not, recorded.json names the commit that last
changed the file; pages show it in brackets, as benchmarks/history.py does.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDED = json.loads((ROOT / "benchmarks" / "recorded.json").read_text())
PACKAGES = ("torch", "cuda", "transformers", "peft", "bitsandbytes", "triton", "trl", "liger-kernel", "quack-kernels",
            "fla-core", "mamba-ssm", "causal-conv1d")  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """What a result was measured on; `commit` is in brackets where the result does not name it."""

    file: str
    device: str
    gpus: int
    date: str
    commit: str
    versions: dict[str, str]
    cap_gb: float | None = None

    @property
    def card(self) -> str:
        return card_of(self.device)

    @property
    def link(self) -> str:
        return f"[{self.file.removesuffix('.json')}](../benchmarks/results/{self.file})"

    @property
    def in_words(self) -> str:
        """The versions, and the memory that a process was allowed to take."""
        words = [f"{'CUDA' if name == 'cuda' else name} {v}" for name, v in self.versions.items()]
        return ", ".join([*words, *([f"at most {self.cap_gb:.0f} GB of a GPU"] if self.cap_gb else [])])


def card_of(device: str) -> str:
    """A short name of a device: "h100" of "NVIDIA H100 80GB HBM3", "rtx4090" of "NVIDIA GeForce RTX 4090", "cpu"."""
    if not device.startswith(("NVIDIA", "AMD Radeon", "AMD Instinct")):
        return "cpu"
    words = re.sub(r"NVIDIA|AMD|GeForce|\b\d+GB\b|HBM\w*|PCIe|SXM\w*|NVL", "", device).lower()
    return re.sub(r"[^a-z0-9]", "", words)


def read(file: str):
    return json.loads((RESULTS / file).read_text())


def save(path: Path, report) -> None:
    """Writes a report in one step: one that is cut off leaves the last."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def _all(report, machines, key):
    """The values of a key in the machines and the rows: each once, in order."""
    return list(dict.fromkeys(each[key] for each in (*machines, *report.get("rows", ())) if each.get(key)))


def _has_liger(report) -> bool:
    """Whether liger-kernel, with Triton, is one of the rivals."""
    rows = report.get("rows", ())
    return any(row.get("arm") == "triton" or row.get("rival") == "liger (Triton)" for row in rows) or any(
        "triton" in each for each in report.values() if isinstance(each, dict) and "machine" in each
    )


def provenance(file: str, report=None) -> Provenance:
    """Raises ValueError where the result lacks a card, a date, a commit, the version of torch or that of a
    liger-kernel that it compares with."""
    report = read(file) if report is None else report
    machines = [report["machine"]] if "machine" in report else [each["machine"] for each in report.values()]
    old = RECORDED.get(file, {})
    short = lambda commit: re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", commit)
    commits = list(dict.fromkeys(map(short, _all(report, machines, "commit"))))
    dates = sorted(_all(report, machines, "date")) or ([old["date"]] if old else [])
    if not commits and old:
        commits = [f"({old['commit']})"]
    versions = {name: machines[0][name] for name in PACKAGES if machines[0].get(name)}
    needed = {
        "card": machines[0].get("device"),
        "date": dates,
        "commit": commits,
        "version of torch": versions.get("torch"),
        "version of liger-kernel": versions.get("liger-kernel") or not _has_liger(report),
    }
    lacks = [name for name, value in needed.items() if not value]
    if lacks:
        raise ValueError(f"{file} has no {', no '.join(lacks)}")
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    first = machines[0]
    return Provenance(
        file, first["device"], first.get("gpus", 1), when, ", ".join(commits), versions, first.get("cap_gb")
    )


def results() -> list[str]:
    return sorted(path.name for path in RESULTS.glob("*.json"))
