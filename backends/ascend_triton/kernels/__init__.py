"""Device code: Triton 3.2 as triton-ascend lowers it. Imported only where a kernel runs."""
