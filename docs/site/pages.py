"""Generates two pages of the site: the first one, from README.md, and the Python reference."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
#: The modules that users import, with their titles.
MODULES = {
    "liger_kernel.chunked_loss": "Losses on hidden states",
    "liger_kernel.ops.linear_log_prob": "Log-probabilities under a head",
    "liger_kernel.ops.linear_distillation": "Distillation of a head",
    "liger_kernel.ops.sliced_log_prob": "Sharded and quantised heads",
    "liger_kernel.transformers.functional": "Functions",
    "liger_kernel.transformers.rms_norm": "RMSNorm",
    "liger_kernel.transformers.layer_norm": "LayerNorm",
    "liger_kernel.transformers.swiglu": "SwiGLU",
    "liger_kernel.transformers.geglu": "GeGLU",
    "liger_kernel.transformers.cross_entropy": "Cross entropy",
    "liger_kernel.transformers.fused_linear_cross_entropy": "Fused linear cross entropy",
    "liger_kernel.transformers.patch": "Patches",
    "liger_kernel.transformers.report": "Reports of patches",
    "liger_kernel.memory": "Memory",
    "liger_kernel.trl": "TRL",
}


def reference():
    parts = [f"## {title}\n\n::: {module}\n" for module, title in MODULES.items()]
    return "# Python\n\n" + "\n".join(parts)


def on_files(files, config):
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](").replace("](liger/", "](../liger/")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "python.md", content=reference()))
    return files
