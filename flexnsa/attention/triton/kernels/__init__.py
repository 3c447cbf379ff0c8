"""Triton kernels; the files in the folder above launch them.

Python has no types for the values in a kernel, so these files are exempt from strict type checks.
"""
