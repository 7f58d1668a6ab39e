"""The same ranks in every process: ties must not depend on the order of a hash table."""

import os
import subprocess
import sys

CODE = """
from rankfold.allocation import allocate
from rankfold.methods import LatentLLM, PrunableModule
units = [PrunableModule(b, m, (8, 16, 24, 32), (10, 20, 31, 40)) for b in range(5) for m in ("q", "k", "v", "o")]
print(sorted(allocate(units, LatentLLM(sparsity=0.37), 800)[0].items()))
"""


def test_allocation_does_not_depend_on_the_hash_seed():
    runs = []
    for seed in "012":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        runs.append(subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True))
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    assert len({r.stdout for r in runs}) == 1
