"""FlexAttention: each branch a block mask that Inductor compiles, to Triton on CUDA and to C++ on a CPU."""
