"""A process for each arm, so that none inherits another's patch or memory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

APART = Path(__file__).with_name("apart.py")

#: Without it, gaps between blocks of the allocator leave less for a step that fills a GPU.
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def environment_of(rival: str | None) -> dict[str, str]:
    """The environment of a process in which liger_kernel is this package, or the one in the folder of a rival."""
    environment = dict(os.environ)
    if rival:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (rival, os.environ.get("PYTHONPATH"))))
        environment.pop("LIGER_LIBRARY", None)
    return environment


def run(
    *arguments: str, rival: str | None = None, gpus: int = 1, quiet: bool = False, variables: dict | None = None
) -> int:
    """Runs apart.py with some arguments, in a process a GPU, with more environment variables; returns the code that
    they end with."""
    command = [sys.executable]
    if gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    out = subprocess.DEVNULL if quiet else None
    environment = {**environment_of(rival), **(variables or {})}
    return subprocess.run([*command, str(APART), *arguments], env=environment, stdout=out).returncode


def run_arm(job: dict, rival: str | None = None, gpus: int = 1, quiet: bool = False) -> list[dict]:
    """Runs a job (arm.py) and returns its lines of results. The last one has the key out_of_memory or error where it
    ended early."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        variables = SEGMENTS if "largest" in job else {}
        text = json.dumps({**job, "results": str(results), "rival": rival})
        code = run(text, rival=rival, gpus=gpus, quiet=quiet, variables=variables)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if code and not any({"out_of_memory", "error"} & line.keys() for line in lines):
        lines.append(_ended(code))
    return lines


def _ended(code):
    """What a process is said to have died of that wrote nothing."""
    if code == -signal.SIGKILL:  # what a system does that has no memory left
        return {"out_of_memory": None}
    return {"error": f"the process ended with code {code}"}
