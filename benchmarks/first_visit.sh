#!/bin/sh
# On a machine with a GPU and nothing installed: bash benchmarks/first_visit.sh [JOBS]
# Rows go to $OUT/gpu.json, or ./gpu/gpu.json. The longest job is last, so that what does not fit is of it.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=expandable_segments:True
OUT="${OUT:-$PWD/gpu}"
python3 - <<'PY'
import importlib.util, sys
names = "torch transformers accelerate safetensors filelock huggingface_hub numpy psutil rich typer xxhash".split()
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing: {' '.join(missing)}; carry wheels of these")
import torch
print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")
PY
exec python3 benchmarks/gpu.py ${*:-rates precision waits parity} --out "$OUT" --limit 480
