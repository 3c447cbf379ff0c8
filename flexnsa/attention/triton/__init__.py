"""Hand-written Triton kernels; the modules in here are the only ones that import Triton."""
