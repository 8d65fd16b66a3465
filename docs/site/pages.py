"""Generates pages of the site: from the documents at the top of the repository, and the Python reference. Links to
other files of the repository lead to `repo_url`; without one they are text."""

import posixpath
import re
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
    "liger_kernel._patch": "Patching a model of any type",
    "liger_kernel._quantise": "Frozen layers in eight bits",
    "liger_kernel.transformers.patching.apply": "Patches",
    "liger_kernel.transformers.patching.report": "Reports of patches",
    "liger_kernel.memory": "Memory",
    "liger_kernel.routing": "Router replay",
    "liger_kernel.trl": "TRL",
}


def reference():
    parts = [f"## {title}\n\n::: {module}\n" for module, title in MODULES.items()]
    return "# Python\n\n" + "\n".join(parts)


#: Documents outside docs/, and the pages that are made of them.
DOCUMENTS = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files, config):
    for document, page in DOCUMENTS.items():
        text = (ROOT / document).read_text().replace("](docs/", "](")
        inside = lambda link: link[0] if (ROOT / "docs" / link[2]).exists() else link[0].replace("](", "](../", 1)
        text = _LINK.sub(lambda link: link[0] if "://" in link[2] else inside(link), text)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "python.md", content=reference()))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def target(link):
        text, path, anchor = link[1], link[2], link[3] or ""
        name = posixpath.normpath(posixpath.join(folder, path))
        if "://" in path or name.startswith("docs/"):
            return link[0]
        if name in DOCUMENTS:
            depth = posixpath.relpath("docs", folder)
            return f"[{text}]({posixpath.normpath(posixpath.join(depth, DOCUMENTS[name]))}{anchor})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{name}{anchor})" if config.repo_url else text

    return _LINK.sub(target, markdown)
