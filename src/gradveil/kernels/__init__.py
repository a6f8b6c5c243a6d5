"""Compiled kernels: C++ for the CPU (native.py). All optional: the PyTorch path is always there, equal to rounding."""
