"""Plain PyTorch in linear memory: it trains on CPUs, and runs eagerly unless the caller compiles it."""
