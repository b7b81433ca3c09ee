"""From the source to a kernelized model: build the kernel, publish it to a loopback Hub, fetch it from there in a new
process, and compare a kernelized DeepSeek-V4 with the original (demo_model.py, which takes the options below).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from demo_options import add_arguments

from tools.build import build, git_state
from tools.loopback_hub import serve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.parse_args()  # complain now, not after the build

    with tempfile.TemporaryDirectory(prefix="dsv4-demo-") as scratch:
        scratch = Path(scratch)
        git = git_state(ROOT)
        clean = git is not None and not git.dirty
        print("== build")
        if git is None:
            print("from this folder, which is not a git checkout")
        else:
            print(f"from commit {git.commit[:9]}" + (" and changes that are not committed" if git.dirty else ""))
        built = build(ROOT, scratch / "build")
        print("variants:", ", ".join(sorted(path.parent.name for path in built.glob("*/metadata.json"))))

        print("\n== publish")
        with serve(scratch / "hub") as endpoint:
            print(f"a Hub for this demo answers at {endpoint}")
            environment = hub_environment(endpoint, scratch / "home")
            rehearse = [] if clean else ["--allow-dirty"]  # accepted for a Hub on this machine only
            publish = [sys.executable, "-m", "tools.publish", str(ROOT), "--build-dir", str(built), *rehearse]
            subprocess.run(publish, cwd=ROOT, env=environment, check=True)

            print("\n== fetch and kernelize, in a new process with an empty cache", flush=True)
            command = [sys.executable, str(ROOT / "examples" / "demo_model.py"), *sys.argv[1:]]
            return subprocess.run(command, env=environment).returncode


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """The environment with this Hub as the only place that kernels come from."""
    elsewhere = ("LOCAL_KERNELS", "KERNELS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return environment | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_demo",  # any token: uploads need one
        "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
