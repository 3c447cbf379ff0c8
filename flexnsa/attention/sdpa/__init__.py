"""Plain PyTorch in linear memory: it trains on CPUs, and is eager unless one compiles around it."""
