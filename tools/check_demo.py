"""Run what `make demo` runs, as a person would, and judge it by what it leaves: learnt, in time, curve and checkpoint.

The bar is that of the README: greedy accuracy of 0.95 on held-out strings within three minutes on two CPU cores.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setup_env import ROOT, say, stop

ACCURACY, MINUTES = 0.95, 3.0


def main() -> None:
    """Train, then look."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "demo"
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "fusedce.cli", "train", "--out", str(run)], cwd=ROOT)
        minutes = (time.perf_counter() - start) / 60
        if done.returncode:
            stop(f"the demo ended with {done.returncode}")
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        accuracy = [line["held_out_accuracy"] for line in metrics if "held_out_accuracy" in line][-1]
        say(f"held-out accuracy {accuracy:.3f} after {minutes:.1f} minutes")
        if accuracy < ACCURACY or minutes > MINUTES:
            stop(f"expected at least {ACCURACY} within {MINUTES:.0f} minutes")
        for pattern in ("*.png", "step-*/manifest.json", "step-*/*.safetensors"):
            if not any(path.stat().st_size for path in run.glob(pattern)):
                stop(f"the demo left no {pattern}")


if __name__ == "__main__":
    main()
