"""What docs/tools.md tells a user to type, for the tests to type it too."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, RECIPES = ROOT / "docs" / "tools.md", ROOT / "examples" / "recipes"


def snippet(tool, language, place=0):
    """A block of code of a tool's section."""
    section = re.search(rf"^## {re.escape(tool)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]
    return re.findall(rf"```{language}\n(.*?)```", section, re.S)[place]


def yaml_of(tool, place=0):
    import yaml

    return yaml.safe_load(snippet(tool, "yaml", place))


def arguments_of(tool, place=0):
    """The arguments of a command line, from the first option that is of this package."""
    words = shlex.split(snippet(tool, "sh", place).replace("\\\n", " "))
    return tuple(words[words.index("--use_liger_kernel") :][:2])
