"""Kernels for Hopper (sm_90) in Gluon: those of the folder above with asynchronous products.

Triton waits for every product before it goes on. Here products, exponentials and copies of a program overlap.
"""
