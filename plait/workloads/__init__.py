"""The programs that must get fast, in plain PyTorch: `kernels` (one fusion opportunity each) and `models` (whole networks)."""
