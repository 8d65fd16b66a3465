"""The plugin of Axolotl, without Axolotl: `make downstream` trains with it."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
ENTRY = re.search(r'"axolotl.plugins"\]\nlibliger = "([\w.]+):(\w+)"', PROJECT.read_text())


class BasePlugin:
    def pre_model_load(self, cfg):
        raise AssertionError("not called")


class Config(dict):
    """As Axolotl's: what a file does not name is None."""

    __getattr__ = dict.get


@pytest.fixture
def patched(monkeypatch):
    """How often liger_kernel.trl.patch() ran."""
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    calls = []
    trl = types.ModuleType("liger_kernel.trl")
    trl.patch = lambda: calls.append(1)
    monkeypatch.setitem(sys.modules, trl.__name__, trl)
    monkeypatch.setattr("liger_kernel.trl", trl, raising=False)
    return calls


@pytest.mark.parametrize("config, times", [
    (Config(dpo_use_liger_kernel=True), 1),
    (Config(trl=Config(use_liger_loss=True)), 1),
    (Config(trl=Config()), 0),
    (Config(liger_rms_norm=True), 0),
], ids=("DPO", "GRPO", "GRPO without its switch", "SFT"))  # fmt: skip
def test_the_entry_point_names_a_plugin(config, times, patched):
    """It patches TRL for the two switches of losses alone."""
    module = importlib.import_module(ENTRY[1])
    module._plugin.cache_clear()
    plugin = getattr(module, ENTRY[2])()
    assert isinstance(plugin, BasePlugin)
    plugin.pre_model_load(config)
    assert len(patched) == times
    module._plugin.cache_clear()
