"""Kernels: C++ on the CPU, built at first use and cached, and CUDA. Optional, equal to PyTorch up to rounding."""
