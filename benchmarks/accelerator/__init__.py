"""The jobs of benchmarks/gpu.py."""
