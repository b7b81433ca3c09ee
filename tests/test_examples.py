"""The examples run as a user runs them, in processes of their own, and print what they promise."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import DEVICE, ROOT

EXAMPLES = ROOT / "examples"


def run(*command, **environment) -> str:
    """What a Python program prints. It must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if DEVICE == "cpu":
        inherited["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def assert_lists_layers(table, layers):
    for name in ("DeepseekV4Attention", "DeepseekV4RMSNorm", "DeepseekV4UnweightedRMSNorm"):
        assert re.search(rf"^{name} +\d+ +{name}", table, re.MULTILINE), f"{name} has no layer in:\n{table}"
    assert re.search(rf"^DeepseekV4Attention +{layers} ", table, re.MULTILINE)


def test_demo():
    small = ("--layers", 4, "--prompt-tokens", 140, "--tokens", 4, "--runs", 1, "--dtype", "fp32")
    text = run(EXAMPLES / "demo.py", *small)
    assert re.search(r"^published org/dsv4 v1 at [0-9a-f]{40}$", text, re.MULTILINE)
    assert re.search(r"^loaded _dsv4_\w+ from .*/snapshots/[0-9a-f]{40}/build/torch-\w+/", text, re.MULTILINE)
    assert_lists_layers(text, layers=4)
    assert re.search(r"ops in one forward pass:.* rms_norm \d+", text)
    assert re.search(r"ops in one forward pass:.* rope_? 12\b", text)  # q, kv and output of each layer
    differences = re.findall(r"^(\w+ - \w+) +(\S+) +\S+$", text, re.MULTILINE)
    largest = {name: float(value) for name, value in differences}
    assert largest.keys() == {"kernelized - unkernelized", "unkernelized - fp64", "kernelized - fp64"}
    assert largest["kernelized - unkernelized"] < 1e-4
    assert largest["kernelized - fp64"] < 2 * largest["unkernelized - fp64"] < 1e-4
    assert "greedy tokens: equal (4 of 4 " in text
    assert re.search(r"^prefill of 140 tokens +\d+\.\d+ +\d+\.\d+ +\d+\.\d+$", text, re.MULTILINE)
    assert re.search(r"^decode of one token +\d+\.\d+ +\d+\.\d+ +\d+\.\d+$", text, re.MULTILINE)


@pytest.mark.transformers_matrix
def test_quickstart(built):
    text = run(EXAMPLES / "quickstart.py", LOCAL_KERNELS=f"org/dsv4={built}")
    assert_lists_layers(text, layers=4)
    assert re.search(r"^generated: .", text, re.MULTILINE)


def test_training(built):
    text = run(EXAMPLES / "training.py", "--steps", 3, LOCAL_KERNELS=f"org/dsv4={built}")
    losses = [(float(a), float(b)) for a, b in re.findall(r"^ +\d+ +(\S+) +(\S+)$", text, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1][0] < losses[0][0] - 0.1, "it does not learn"
    assert all(abs(a - b) < 1e-3 for a, b in losses)


def test_pinned_project(tmp_path, built):
    sys.path.insert(0, str(EXAMPLES))
    from demo import hub_environment

    from tools.loopback_hub import serve

    project = shutil.copytree(EXAMPLES / "pinned_project", tmp_path / "project")
    with serve(tmp_path / "hub") as endpoint:
        environment = hub_environment(endpoint, tmp_path / "home")
        run("-m", "tools.publish", ROOT, "--build-dir", built / "build", "--allow-dirty", **environment)
        run("-m", "tools.lock", project, **environment)
        online = run(project / "app.py", **environment)
    offline = run(project / "app.py", **environment, HF_HUB_OFFLINE="1")
    assert re.search(r"rms_norm of \(2, 4096\) has rms 1\.000", online)
    assert offline == online
