"""What runs on the device, and nothing else; the files around this folder launch it.

Python has no types for what a kernel takes and computes: these files alone of attention are not checked strictly.
"""
